"""Pipelines: a model cut into stages that lie on different devices and work at the same time."""
