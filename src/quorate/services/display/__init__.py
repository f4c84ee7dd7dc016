"""The display: what a run shows of itself on a terminal or in a log file."""
