"""The script that is running, and how to run it once more: in this process, or in a worker's."""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quorate.settings import overrides, overriding

# A script may change its folder before it trains; its arguments are relative to this one.
_FOLDER = Path.cwd()


@dataclass(frozen=True)
class Script:
    """A program and how it was started."""

    path: str
    module: str | None  # for python -m
    arguments: tuple[str, ...]
    folder: str  # that it is started in
    options: Mapping[str, Any] | None  # of quorate run

    def run(self) -> None:
        """Run it as ``__main__`` in this process. Raises whatever it raises."""
        sys.argv = [self.path, *self.arguments]
        if self.options is None:
            self._run()
            return
        # A model that a script builds before its Trainer starts from equal weights.
        seed = self.options.get("seed", 0)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        with overriding(self.options):
            self._run()

    def sources(self) -> dict[str, int]:
        """The files of its own folder that it consists of so far, and when they were changed."""
        folder = Path(self.path).parent
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        found = {self.path, *(f for f in files if f and Path(f).is_relative_to(folder))}
        return {name: changed for name in found if (changed := _changed_at(name))}

    def changed(self, before: Mapping[str, int]) -> str | None:
        """The name of a file that is not what it was; None if all are."""
        return next((name for name, then in before.items() if _changed_at(name) != then), None)

    def _run(self) -> None:
        if self.module is not None:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            return
        folder = str(Path(self.path).resolve().parent)
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
        runpy.run_path(self.path, run_name="__main__")


def current() -> Script | None:
    """The script that this process runs; None where there is none to start again.

    There is none in a notebook or at a prompt, in an installed program that happens to train (a
    test runner, a server), or in a process of ``multiprocessing``, which began elsewhere.
    """
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or multiprocessing.parent_process() is not None:
        return None
    file = Path(path)
    file = file if file.is_absolute() else _FOLDER / file
    installed = (Path(sysconfig.get_path(name)) for name in ("scripts", "purelib", "stdlib"))
    if not file.is_file() or any(file.is_relative_to(folder) for folder in installed):
        return None
    module = None if spec is None else spec.name
    return Script(str(file), module, tuple(sys.argv[1:]), os.fspath(_FOLDER), overrides())


def _changed_at(name: str) -> int:
    try:
        return Path(name).stat().st_mtime_ns
    except OSError:
        return 0
