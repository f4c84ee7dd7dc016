"""Parts of ``benchmarks/gpu.py``: networks, loops, roles of processes, measurements, a table."""
