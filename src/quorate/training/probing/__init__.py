"""Probing: trials before any worker is started, so that mistakes are found at once."""
