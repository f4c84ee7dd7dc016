"""Forged files of a run directory, and of indexes of data: sound checksums over nonsense."""
