"""The machine: its devices, memory, cores, processes and environment."""
