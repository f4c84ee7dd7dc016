"""The display: the output of a run on a terminal or in a log file."""
