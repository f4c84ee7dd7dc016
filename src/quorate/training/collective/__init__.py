"""Training on a collective: rank 0 leads, the others follow, and all make each update together."""
