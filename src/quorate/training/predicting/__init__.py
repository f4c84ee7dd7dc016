"""Predicting: the outputs of a model for each row of a dataset, in memory or in files."""
