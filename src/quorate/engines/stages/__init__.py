"""Pipeline stages: a replica on several devices of a machine, all at work at the same time."""
