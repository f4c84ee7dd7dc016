"""Optimizing: how a gradient becomes an update, and what of that outlives the process."""
