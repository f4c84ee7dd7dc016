"""The coordinator as plainly as it can be written: whatever is asked is looked for among all.

It is the judge of ``quorate.coordination``, which keeps orders and indexes: on the same events both
must have the same effects. A change of what the coordinator decides is made in both.
"""
