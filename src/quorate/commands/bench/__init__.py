"""Benches: what more workers bring a script, and what keeps them from bringing more.

contenders   numbers of workers, devices: what is compared
runs         each a process of its own, one after the other
split        what a step's time goes into
verdict      the bottleneck in words
results      medians, speed-up, efficiency
table, plot  for people
"""
