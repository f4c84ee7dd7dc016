"""Kernels: by which library a CPU makes the products of float32, where torch leaves a choice."""

# Whose they are; and what may be asked for beside torch's.
TORCH, ONEDNN = "torch", "onednn"
MEASURED = "measured"
