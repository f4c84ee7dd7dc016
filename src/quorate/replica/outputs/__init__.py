"""Outputs: what is computed for each row, and not summed: checked, carried, joined in row order."""
