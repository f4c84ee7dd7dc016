"""Training: a state, its updates, and the training loop, from a recipe to the last save."""
