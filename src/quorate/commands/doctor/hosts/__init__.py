"""The doctor on several hosts: what torchrun would start, and what lies between the hosts."""
