"""Training: a state, its updates, and the loop that makes them, from a recipe to the last save."""
