"""Benches: the gain from more workers for a script, and the limit of the gain.

contenders   numbers of workers, devices: the subjects of the comparison
runs         each run in a separate process, one after another
split        the parts of a step's time
verdict      the bottleneck in words
results      medians, speed-up, efficiency
table, plot  output for people
"""
