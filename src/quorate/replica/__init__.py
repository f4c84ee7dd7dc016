"""Replicas: from a shard of rows and parameters to a weighted gradient."""
