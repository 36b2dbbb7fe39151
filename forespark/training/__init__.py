"""Drafter training: corpus rows and the target's hidden states in, checkpoints out."""
