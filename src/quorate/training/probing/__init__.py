"""Probing: what is tried before anything is started, so that it fails at once and not later."""
