"""Kernels of updates, called without what torch does around them."""
