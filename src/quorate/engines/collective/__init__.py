"""The collective: every rank has the model, and ranks exchange slices of what they computed."""
