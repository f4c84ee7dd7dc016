"""Engines of the configurations: name -> options of ``quorate run``."""


def _options(engine: str, workers: int) -> tuple[str, ...]:
    return ("--devices", "cpu", "--engine", engine, "--workers", str(workers))


ENGINES: dict[str, tuple[str, ...]] = {
    "inline": ("--devices", "cpu", "--workers", "1"),
    **{f"towers:{n}": _options("towers", n) for n in (2, 3, 4)},
    **{f"processes:{n}": _options("processes", n) for n in (1, 2, 3)},
    **{f"ranks:{n}": _options("collective", n) for n in (2, 4)},
    "stages": ("--devices", "cpu+cpu", "--workers", "1"),
    "stages:2": (*_options("processes", 2), "--devices", "cpu+cpu,cpu+cpu"),
}

# Engines with processes as workers, killable in turn.
MORTAL = ("processes:2", "processes:3", "ranks:2", "stages", "stages:2")
