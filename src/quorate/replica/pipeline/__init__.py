"""Pipelines: a model cut into stages on different devices that work at the same time."""
