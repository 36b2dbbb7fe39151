"""Prompt sources to a tokenized corpus of the target's own answers."""
