"""A script as a worker runs it: what it is told, cannot read, and should not write."""
