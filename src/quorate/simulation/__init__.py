"""Simulation: the real coordinator in virtual time, and what a run of any size would do."""
