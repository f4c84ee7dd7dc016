"""Checkpoints: what is on disk, when it is written, what stays, and weights to begin from."""
