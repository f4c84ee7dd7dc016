"""Workers of this process: towers, which are threads, or the thread that drives when alone."""
