"""Probing: trials before any worker is started, to find mistakes at once."""
