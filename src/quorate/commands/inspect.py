"""``quorate inspect``: the state of a run, and which of its checkpoints are sound."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import Command
from quorate.errors import SettingError
from quorate.machine.valid_json import dumped

if TYPE_CHECKING:
    from quorate.services.checkpoints.files import Listed

HIDDEN = (
    *("files", "order", "optimizer_numbers", "format"),
    *("doubts", "row_sample", "hyperparameters"),
)
OF_A_PHASE = ("name", "updates", "optimizer", "schedule", "clip_norm", "ema_decay")
MOST_CHARACTERS = 2000  # of a line: a record may hold anything
HELP = """Show the state of a run, and check every checkpoint against its checksums.

RUN_DIR is the directory passed to Trainer or --run-dir. With --address, RUN_DIR names a detached
run on a Ray cluster. With --address alone, list all detached runs of the cluster.
"""


@click.command(
    "inspect", cls=Command, help=HELP, short_help="show the state and the checkpoints of a run"
)
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="print the result as one JSON object")
@click.option("--address", metavar="HOST:PORT", help="address of a Ray cluster with detached runs")
def command(run_dir: Path | None, as_json: bool, address: str | None) -> int:
    """Print the state's facts and digests, computed from the saved tensors.

    Raises:
        CheckpointError: there is no sound checkpoint.
        UserError: there is no such cluster or run.
    """
    if address is not None:
        from quorate.commands import detached

        if run_dir is None:
            return detached.listed(address)
        return detached.inspected(address, run_dir, ["--json"] if as_json else [])
    if run_dir is None:
        raise SettingError("RUN_DIR", None, "a run directory", "name one, or a cluster: --address")
    from quorate.coordination.tally import Tally
    from quorate.errors import CheckpointError
    from quorate.machine.columns import aligned
    from quorate.machine.printable import printable
    from quorate.services.checkpoints import files

    listed = files.listing(run_dir)
    if not listed:
        raise CheckpointError(f"no checkpoint in {run_dir}; is it a run directory?")
    sound = next((saved for saved in listed if saved.wrong is None), None)
    if sound is None:
        wrong = "; ".join(str(saved.wrong) for saved in listed)
        raise CheckpointError(f"no sound checkpoint in {run_dir}: {wrong}")
    path = sound.path
    record = files.record_of(path)
    facts: dict[str, Any] = {
        "checkpoint": str(path),
        "damaged": [saved.wrong for saved in listed if saved.wrong is not None],
    }
    facts |= {name: value for name, value in record.items() if name not in HIDDEN}
    if record.get("phases") is not None:
        facts["phases"] = [
            {name: each.get(name) for name in OF_A_PHASE} for each in record["phases"]
        ]
    for file, name in (("model", "digest"), ("averaged", "averaged_digest")):
        if f"{file}.safetensors" in record["files"]:
            facts[name] = files.digest_of(path, f"{file}.safetensors", record["order"])
    facts["checkpoints"] = [
        {
            "global_step": saved.global_step,
            "bytes": saved.nbytes,
            "saved_at": saved.saved_at,
            "is_sound": saved.wrong is None,
        }
        for saved in listed
    ]
    if "doubts" in record:  # not in checkpoints of before
        facts["doubts"] = _doubts(record)
        facts["same_bits"] = not facts["doubts"]
    if as_json:
        print(dumped(facts, indent=1))
        return 0
    if "phases" in facts:
        facts["phases"] = [*map(_phase, facts["phases"])]
        facts["round"] = " ".join(record["round"]["phases"])
    best = record["account"]["best"]
    facts["checkpoints"] = [_line(saved, best) for saved in listed]
    facts["account"] = Tally(record["account"]["tally"]).summary()
    facts["saved_at"] = _time(record["saved_at"])
    if doubts := facts.pop("doubts", []):
        facts["same_bits"] = [f"no, because {doubt}" for doubt in doubts]
    elif "same_bits" in facts:
        facts["same_bits"] = "yes"
    rows = [
        ("" if number else name, printable(line, MOST_CHARACTERS))
        for name, value in facts.items()
        if value is not None
        for number, line in enumerate(value if isinstance(value, list) else [value])
    ]
    print(aligned(rows))
    return 0


def _doubts(record: dict[str, Any]) -> list[str]:
    """Return why the bits may be others on another number of workers, or after a resume."""
    from quorate.coordination import rules

    doubts = [str(doubt) for doubt in record["doubts"]]
    if not rules.keeps_bits(rules.parse(record["update"]), record["shards"]):
        doubts.insert(0, f"update={record['update']}: they depend on timing")
    return doubts


def _phase(phase: dict[str, Any]) -> str:
    """``g: 1,200 updates, Adam, StepLR, clip_norm 1.0``."""
    said = [f"{phase['updates']:,} updates", phase["optimizer"], phase["schedule"]]
    said += [f"{name} {phase[name]}" for name in ("clip_norm", "ema_decay") if phase[name]]
    return f"{phase['name']}: {', '.join(word for word in said if word)}"


def _line(saved: Listed, best: dict[str, Any] | None) -> str:
    """``step 1,200  13,204,512 bytes  2026-11-21 10:02:11  sound``."""
    from quorate.machine.columns import in_four_places

    state = "sound" if saved.wrong is None else saved.wrong
    if best is not None and best["global_step"] == saved.global_step:
        state += f", the best {best['metric']}: {in_four_places(best['value'])}"
    when = "" if saved.saved_at is None else _time(saved.saved_at)
    return f"step {saved.global_step:,}  {saved.nbytes:,} bytes  {when}  {state}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
