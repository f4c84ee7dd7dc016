"""Kernels of updates, called without torch's code around them."""
