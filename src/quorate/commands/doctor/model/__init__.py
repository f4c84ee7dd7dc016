"""The doctor on a script: what its model takes of a device, and where it may be cut for two."""
