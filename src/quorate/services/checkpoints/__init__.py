"""Checkpoints: the format on disk, when to save, which to keep, and initial weights."""
