"""Training: the state, the updates and the training loop, from the settings to the last save."""
