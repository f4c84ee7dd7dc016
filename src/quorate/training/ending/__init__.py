"""The end of training: metrics needed at the end are checked at the start; weights are restored."""
