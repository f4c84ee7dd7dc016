"""Serving: parameters and the optimizer's state lie in slices on servers, which make the updates.

What works element by element does the same to an element in a slice as in a whole vector, sums go
along the same tree, and a norm is that of the same blocks: so the bits are those of a coordinator
that has it all, for any number of servers. It decides as ever, and sees records.
"""
