"""Optimizers over gradients by rows."""
