"""Kernels: the library for float32 products on a CPU, where torch leaves a choice."""

# The libraries; and the setting that chooses by a measurement.
TORCH, ONEDNN = "torch", "onednn"
MEASURED = "measured"
