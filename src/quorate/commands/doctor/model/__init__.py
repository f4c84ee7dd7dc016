"""The doctor on a script: the model's memory on a device, and the possible cuts for two."""
