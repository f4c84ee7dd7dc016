"""Phases: several models in one training, each update with a loss and an optimizer of its own."""
