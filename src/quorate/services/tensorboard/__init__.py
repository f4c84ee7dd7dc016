"""Summaries for TensorBoard: curves of a run, and entries of callbacks."""
