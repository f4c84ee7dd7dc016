"""Summaries for TensorBoard: curves of a run, and what callbacks add."""
