"""The doctor: the available devices, the needs of a run, and the expected problems.

``examination`` collects facts, ``verdicts`` judges the facts, ``table`` shows both.
"""
