"""RunDir: where a run is kept, how often it is saved, and what it begins from."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from quorate.services.tracing.asked import ALL, new_file, steps, steps_between
from quorate.settings import (
    Settings,
    about,
    at_least,
    between,
    directory,
    file_or_directory,
    switch,
)


@dataclass(frozen=True)
class RunDir(Settings):
    """The directory of a run. A plain path in its place is ``path``.

    Args:
        path: where state and metrics are saved, and a run that was interrupted is resumed from.
            Without it nothing is written.
        save_every_s: seconds from one checkpoint to the next, the most that a kill may cost; None
            for none but at the end, after a stop and after an exception.
        save_every_steps: also after every so many updates; training waits for the disk.
        keep: how many of the newest checkpoints stay.
        keep_every_h: one checkpoint every so many hours stays for ever.
        summary_every_s: seconds between two points of a curve in TensorBoard; None for none.
        fresh: begin anew in a directory that holds a run, which is moved aside.
        init_from: weights to begin from: .safetensors, a state dict by ``torch.save``, or a run
            directory. A run that is resumed has its own. It needs no ``path``.
        trace: a file for the timeline of the run, as JSON that chrome://tracing and Perfetto open:
            what coordinator and workers were at when. To find out what a step's time goes into, and
            who waits for whom. Written at the end of ``fit``, however that ends. It needs no
            ``path``.
        trace_steps: "A:B": only steps from A to before B, counted from 0, are in it. For long runs:
            a trace has 200,000 spans at most, the first.
    """

    path: Path | str | None = field(
        default=None,
        metadata=about(
            "directory for checkpoints and metrics; an interrupted run resumes from here",
            name="run_dir",
            kind=str,
            metavar="DIR",
            check=directory,
        ),
    )
    _: KW_ONLY
    save_every_s: float | None = field(
        default=600.0,
        metadata=about(
            "seconds between checkpoints, or none (default: 600)", kind=float, check=between(0)
        ),
    )
    save_every_steps: int | None = field(
        default=None,
        metadata=about("also save a checkpoint every N updates", kind=int, check=at_least(1)),
    )
    keep: int = field(
        default=5,
        metadata=about(
            "number of newest checkpoints to keep (default: 5)", kind=int, check=at_least(1)
        ),
    )
    keep_every_h: float | None = field(
        default=None,
        metadata=about(
            "also keep one checkpoint per this many hours for good", kind=float, check=between(0)
        ),
    )
    summary_every_s: float | None = field(
        default=20.0,
        metadata=about(
            "seconds between two points of a TensorBoard curve, or none (default: 20)",
            kind=float,
            check=between(0),
        ),
    )
    fresh: bool = field(
        default=False,
        metadata=about(
            "start a new run; a run found in --run-dir is moved aside", kind=bool, check=switch
        ),
    )
    init_from: Path | str | None = field(
        default=None,
        metadata=about(
            "initial weights: a .safetensors file, a saved state dict or a run directory",
            kind=str,
            metavar="PATH",
            check=file_or_directory,
        ),
    )
    trace: Path | str | None = field(
        default=None,
        metadata=about(
            "write a timeline of the run, for chrome://tracing or Perfetto, to FILE",
            kind=str,
            metavar="FILE",
            check=new_file,
        ),
    )
    trace_steps: str | None = field(
        default=None,
        metadata=about(
            "steps in the timeline: from A up to, but not including, B",
            kind=str,
            metavar="A:B",
            check=steps,
        ),
    )

    @property
    def traced_steps(self) -> range:
        """The steps that a trace is to have."""
        return steps_between(self.trace_steps or ALL)
