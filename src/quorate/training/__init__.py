"""Training: the state, the updates and the training loop, from a recipe to the last save."""
