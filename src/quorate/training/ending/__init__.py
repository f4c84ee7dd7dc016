"""The end of training: what it is decided by is looked for before it begins; weights go back."""
