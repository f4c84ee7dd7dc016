"""Gradients by rows: of tables of which a shard reads a few, as of ``Embedding(sparse=True)``."""
