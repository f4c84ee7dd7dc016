"""The doctor: what devices there are, what a run needs, and what would go wrong.

``examination`` finds facts, ``verdicts`` judges them, ``table`` shows both.
"""
