"""Phases: several models in a training, each with a loss and an optimizer."""
