"""CPU twins (block_tables)."""
