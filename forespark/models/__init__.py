"""Draft models for training: backbone, selector, estimators and losses.

The room takes tensors and gives losses and logits. It may import speculators, whose
DFlash 2 and DSpark cores it trains, and nothing else of ours.
"""
