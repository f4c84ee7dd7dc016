"""Stages in processes of their own: one replica on several devices of a machine, all at work."""
