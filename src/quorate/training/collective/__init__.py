"""Training on a collective: rank 0 leads, all ranks follow, and all ranks make updates together."""
