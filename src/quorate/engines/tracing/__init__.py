"""Tracing: what coordinator and workers were at when, gathered while they run."""
