"""Where operators run: on a replica's device, or on the CPU where it has no kernel; and the log."""
