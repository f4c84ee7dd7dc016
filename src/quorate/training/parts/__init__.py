"""Updates in parts: one process per device of a replica in stages, each with a part of an update.

The optimizer's state per element lies in shared memory. Each process writes its own part; the
process of the coordinator writes none, unless user code changes the state. So no state is lost with
a killed process.
"""
