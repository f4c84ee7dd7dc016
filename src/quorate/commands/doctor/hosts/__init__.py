"""The doctor on several hosts: the ranks started by torchrun, and the network between hosts."""
