"""The witness: whether shards change what only updates may, and whether they come out the same."""
