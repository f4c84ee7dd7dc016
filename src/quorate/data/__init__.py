"""Data sets: reading their files, and getting those files once, verified and cached."""
