"""The machine: devices, memory, cores, processes and environment."""
