"""The running script, as a value: to be run again in this process or in a worker."""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quorate.machine.regular_file import is_file
from quorate.settings import overriding

# A script may change its folder before it trains; its arguments are relative to this one.
_folder = os.getcwd() if Path().exists() else "/"  # noqa: PTH109

_running: Script | None = None  # by ``Script.run`` in this process


@dataclass(frozen=True)
class Script:
    """A program with its arguments, folder and options."""

    path: str
    module: str | None  # for python -m
    arguments: tuple[str, ...]
    folder: str  # that it is started in
    options: Mapping[str, Any] | None  # of quorate run

    def run(self) -> None:
        """Run the program as ``__main__`` in this process. Raises the program's exceptions."""
        global _running
        sys.argv = [self.path, *self.arguments]
        before, _running = _running, self
        try:
            self._prepare()
            with nullcontext() if self.options is None else overriding(self.options):
                self._run()
        finally:
            _running = before

    def within(self, folder: Path, copy: Path) -> Script:
        """Return the same script in a copy of a folder, started in the copy."""

        def moved(path: str) -> str:
            return str(copy / Path(path).resolve().relative_to(folder))

        is_within = Path(self.folder).resolve().is_relative_to(folder)
        started_in = moved(self.folder) if is_within else str(copy)
        return replace(self, path=moved(self.path), folder=started_in)

    def _prepare(self) -> None:
        if self.options is None:
            return
        # A model that a script builds before its Trainer starts from equal weights.
        seed = self.options.get("seed", 0)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**64)  # one that is none is refused where settings are checked

    def sources(self) -> dict[str, int]:
        """Return the imported files of the script's folder, with their times of change."""
        folder = Path(self.path).parent
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        names = {self.path, *(f for f in files if f and Path(f).is_relative_to(folder))}
        return {name: changed for name in names if (changed := _changed_at(name))}

    def changed(self, before: Mapping[str, int]) -> str | None:
        """Return the name of a changed file; None if no file has changed."""
        return next((name for name, then in before.items() if _changed_at(name) != then), None)

    def _run(self) -> None:
        if self.module is not None:
            if sys.path[:1] != [self.folder]:  # as python -m has it
                sys.path.insert(0, self.folder)
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            return
        folder = str(Path(self.path).resolve().parent)
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
        runpy.run_path(self.path, run_name="__main__")


def current() -> Script | None:
    """Return the script of this process; None if nothing could be started again.

    A notebook and a prompt have no script, nor has an installed program that happens to train (a
    test runner, a server), nor a process of ``multiprocessing``, which began in the middle.
    """
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or multiprocessing.parent_process() is not None:
        return None
    if _running is not None:
        return _running
    file = Path(_folder, path)
    if not is_file(file) or _is_installed(file):
        return None
    if spec is not None and spec.name == "__main__":  # python FOLDER
        return Script(str(file.parent), None, _arguments(file.parent.name), _folder, None)
    if spec is not None:
        return Script(str(file), spec.name, _arguments(spec.name), _folder, None)
    return Script(str(file), None, _arguments(file.name), _folder, None)


def _arguments(program: str) -> tuple[str, ...]:
    """Return the arguments of the command; ``sys.argv`` may have changed since."""
    for position, word in enumerate(sys.orig_argv[1:], start=2):
        if word == program or Path(word).name == program:
            return tuple(sys.orig_argv[position:])
    return tuple(sys.argv[1:])


def _is_installed(file: Path) -> bool:
    schemes = sysconfig.get_scheme_names()
    names = ("scripts", "stdlib")
    folders = {sysconfig.get_path(name, scheme) for name in names for scheme in schemes}
    folders |= {sysconfig.get_path(name) for name in names}
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or any(
        file.is_relative_to(folder) for folder in folders
    )


def _changed_at(name: str) -> int:
    try:
        return Path(name).stat().st_mtime_ns
    except OSError:
        return 0
