"""Updates in parts: a process for each device of a replica in stages, which has a part of them.

What an optimizer keeps by element lies in shared memory, of which each process writes its own part,
and this one none, unless somebody looks at it. So a process that is killed takes nothing with it.
"""
