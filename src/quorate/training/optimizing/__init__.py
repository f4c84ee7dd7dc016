"""Optimizing: how a gradient becomes an update, and which state of an optimizer is saved."""
