"""Losses over the whole batch: what shards represent of their rows, and the loss of all rows."""
