"""Owners: who has the optimizer's state and makes the updates, besides the main process alone.

    ranks               each rank of a collective, for its slice: ``rank_owners``
    servers             processes on a cluster, each for its slice: ``server_owners``
    stage processes     forks, each for a part of the parameters: ``parted_optimizer``

An element-wise optimizer treats an element of a slice as in a whole vector, sums follow the same
tree, and a norm is summed over the same blocks: so the bits are those of a process that has
everything, for any number of owners. The main process makes the same decisions for all owners.
"""
