"""Fits from recorded runs: estimator calibration and latency tables (Appendix B)."""
