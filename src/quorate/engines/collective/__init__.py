"""The collective: every rank has the model, and ranks exchange slices of their gradients."""
