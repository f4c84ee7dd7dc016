"""Coordination: who computes what, and what makes an update. Pure: no torch, clock or thread."""
