"""Outputs: values per row that are not summed, but checked, sent, and joined in row order."""
