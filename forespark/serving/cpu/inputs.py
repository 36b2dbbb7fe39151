"""CPU twins (inputs)."""
