"""Serving: servers hold slices of the parameters and optimizer state, and make the updates.

An element-wise optimizer treats an element of a slice as in a whole vector, sums follow the same
tree, and a norm is summed over the same blocks: so the bits are those of a coordinator that holds
everything, for any number of servers. The coordinator makes the same decisions, and handles records
of gradients.
"""
