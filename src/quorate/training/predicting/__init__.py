"""Predicting: what a model returns for each row of a dataset, in memory or in files."""
