"""Losses over the whole batch: representations of the rows of shards, and the loss of all rows."""
