"""Gradients by rows: of tables of which a shard reads few rows, as ``Embedding(sparse=True)``."""
