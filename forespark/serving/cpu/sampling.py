"""CPU twins (sampling)."""
