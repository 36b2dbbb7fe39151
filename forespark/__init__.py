"""ForeSpark: work-conserving speculation for parallel drafters on vLLM."""

__version__ = "0.1.0"
