"""The directory of a run: its settings, lock, contents, status and logs."""
