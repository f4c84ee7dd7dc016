"""Settings by their names at the command, put into their groups: for tests with a few changes."""

from dataclasses import fields, replace
from typing import Any

import quorate

# Keyword of Trainer -> its group of settings, and the field of a plain value.
GROUPS = {
    "optimizer": (quorate.Optimize, "optimizer"),
    "workers": (quorate.Workers, "count"),
    "compute": (quorate.Compute, None),
    "loading": (quorate.Loading, None),
    "run_dir": (quorate.RunDir, "path"),
}
# Fields with different names at the command.
NAMES = {
    ("workers", "count"): "workers",
    ("workers", "timeout_s"): "worker_timeout_s",
    ("loading", "processes"): "loader_workers",
    ("run_dir", "path"): "run_dir",
}


def trainer(model: Any, loss: Any, **settings: Any) -> quorate.Trainer:
    """Return a trainer: ``trainer(Net, loss, clip_norm=1.0, threads=2, run_dir="a", keep=1)``."""
    keywords = dict(settings)
    for keyword, (group, plain) in GROUPS.items():
        # First: some keywords are called as a field of their group, "workers" for example.
        value = keywords.pop(keyword, None)
        names = {NAMES.get((keyword, f.name), f.name): f.name for f in fields(group)}
        given = {field: keywords.pop(name) for name, field in names.items() if name in keywords}
        if isinstance(value, group):
            keywords[keyword] = replace(value, **given)
        elif value is not None:
            assert plain is not None
            keywords[keyword] = group(**{plain: value} | given)
        elif given:
            keywords[keyword] = group(**given)
    return quorate.Trainer(model, loss, **keywords)
