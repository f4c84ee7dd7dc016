"""Placement: operators run on the replica's device, or without a kernel on the CPU; and the log."""
