"""What user code is given beside model and batch: where in its run it is; shared values."""
