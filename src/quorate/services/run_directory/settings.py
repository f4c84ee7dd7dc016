"""The settings of a run directory: where to save, how often, which weights to start from."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from quorate.errors import SettingError
from quorate.machine.regular_file import is_folder, reason_against_new_file
from quorate.settings import (
    Settings,
    at_least,
    between,
    declare,
    directory,
    file_or_directory,
    switch,
)

ALL = "0:"

_LAST_STEP = 1 << 62  # beyond any step
_STEPS = re.compile(r"[0-9]{1,18}:[0-9]{0,18}|:[0-9]{1,18}")


def steps(name: str, value: object) -> str:
    """Check a range of steps.

    Raises:
        SettingError: the value is not a range, or the range is empty.
    """
    expected = "two whole numbers A:B, A below B: steps from A to before B"
    if not isinstance(value, str) or not _STEPS.fullmatch(value):
        raise SettingError(name, value, expected, "write 100:110")
    if not steps_between(value):
        raise SettingError(name, value, expected, "there is no step in it")
    return value


def steps_between(text: str) -> range:
    """Return the steps of ``A:B``; A or B may be left out."""
    first, _, last = text.partition(":")
    return range(int(first or 0), int(last or _LAST_STEP))


def new_file(name: str, value: object) -> Path:
    """Check the path of a file to write or replace.

    Raises:
        SettingError: the value is no path, or names a directory, or the parent folder is missing.
    """
    expected = "the path of a file in a folder that there is"
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise SettingError(name, value, expected, "pass a str or a Path")
    path = Path(value)
    if is_folder(path):
        fix: str | None = "it is a folder: name a file in it"
    elif not is_folder(path.absolute().parent):
        fix = "make the folder first"
    else:
        fix = reason_against_new_file(path)
    if fix is not None:
        raise SettingError(name, str(value), expected, fix)
    return path


@dataclass(frozen=True)
class RunDir(Settings):
    """Settings of the run directory: what to save, how often, and the initial weights.

    A plain path instead of ``RunDir(...)`` sets ``path``.

    Args:
        path: directory for checkpoints and metrics; an interrupted run in the directory resumes.
            Default: nothing is written.
        save_every_s: seconds between two checkpoints, and so the most training time that a kill may
            cost. None: save only at the end, after a stop and after an exception. Default: 600.
        save_every_steps: also save a checkpoint every so many updates. Training waits until such a
            checkpoint is on the disk. Default: None.
        keep: number of newest checkpoints to keep. Default: 5.
        keep_every_h: also keep one checkpoint per so many hours for good. Default: None.
        summary_every_s: seconds between two points of a TensorBoard curve; None for no summaries.
            Default: 20.
        fresh: whether to start a new run. A run in the directory is moved to the subfolder aside-1
            (or the next free number); nothing is deleted. Default: False, resume the run in the
            directory.
        init_from: initial weights: a .safetensors file, a state dict saved with ``torch.save``, or
            a run directory. A resumed run uses its own weights instead. Works without ``path``.
        trace: file for a timeline of the run, in the JSON format of chrome://tracing and Perfetto.
            The timeline shows the activity of the coordinator and of each worker; use the timeline
            to find out where the time of a step goes and which worker the others wait for. The file
            is written when ``fit`` ends, also after an error. Works without ``path``.
        trace_steps: steps in the timeline as "A:B", from step A up to, but not including, step B,
            counted from 0. Set ``trace_steps`` for long runs: a timeline keeps only the first
            200,000 spans.
    """

    path: Path | str | None = declare(
        None,
        "directory for checkpoints and metrics; an interrupted run resumes from here",
        name="run_dir",
        kind=str,
        metavar="DIR",
        check=directory,
    )
    _: KW_ONLY
    save_every_s: float | None = declare(
        600.0, "seconds between checkpoints, or none (default: 600)", kind=float, check=between(0)
    )
    save_every_steps: int | None = declare(
        None, "also save a checkpoint every N updates", kind=int, check=at_least(1)
    )
    keep: int = declare(
        5, "number of newest checkpoints to keep (default: 5)", kind=int, check=at_least(1)
    )
    keep_every_h: float | None = declare(
        None, "also keep one checkpoint per this many hours for good", kind=float, check=between(0)
    )
    summary_every_s: float | None = declare(
        20.0,
        "seconds between two points of a TensorBoard curve, or none (default: 20)",
        kind=float,
        check=between(0),
    )
    fresh: bool = declare(
        False, "start a new run; a run found in --run-dir is moved aside", kind=bool, check=switch
    )
    init_from: Path | str | None = declare(
        None,
        "initial weights: a .safetensors file, a saved state dict or a run directory",
        kind=str,
        metavar="PATH",
        check=file_or_directory,
    )
    trace: Path | str | None = declare(
        None,
        "write a timeline of the run, for chrome://tracing or Perfetto, to FILE",
        kind=str,
        metavar="FILE",
        check=new_file,
    )
    trace_steps: str | None = declare(
        None,
        "steps in the timeline: from A up to, but not including, B",
        kind=str,
        metavar="A:B",
        check=steps,
    )

    @property
    def traced_steps(self) -> range:
        """The steps in the timeline, as a range."""
        return steps_between(self.trace_steps or ALL)
