"""Values for user code beside model and batch: the position in the run, and shared values."""
