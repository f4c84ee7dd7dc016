"""What ``benchmarks/gpu.py`` is made of: networks, loops, measurements, and a table for each."""
