"""``quorate inspect``: the state of a run, and which of its checkpoints are sound."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate.services.checkpoints.files import Listed

    Commands = argparse._SubParsersAction[Any]


HIDDEN = ("files", "order", "optimizer_numbers", "format")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("inspect", help="show a run's state", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="as given to Trainer or --run-dir")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(call=inspect)


def inspect(options: argparse.Namespace) -> int:
    """Print the state's facts and digests, computed from the saved tensors.

    Raises:
        CheckpointError: there is no sound checkpoint.
    """
    from quorate.coordination.tally import Tally
    from quorate.errors import CheckpointError
    from quorate.machine.columns import aligned
    from quorate.services.checkpoints import files as checkpoint

    listed = checkpoint.listing(options.run_dir)
    if not listed:
        raise CheckpointError(f"no checkpoint in {options.run_dir}; is it a run directory?")
    sound = next((one for one in listed if one.wrong is None), None)
    if sound is None:
        wrong = "; ".join(str(one.wrong) for one in listed)
        raise CheckpointError(f"no sound checkpoint in {options.run_dir}: {wrong}")
    path = sound.path
    record = checkpoint.record_of(path)
    facts: dict[str, Any] = {
        "checkpoint": str(path),
        "damaged": [one.wrong for one in listed if one.wrong is not None],
    }
    facts |= {name: value for name, value in record.items() if name not in HIDDEN}
    for file, name in (("model", "digest"), ("averaged", "averaged_digest")):
        if f"{file}.safetensors" in record["files"]:
            facts[name] = checkpoint.digest_of(path, f"{file}.safetensors", record["order"])
    facts["checkpoints"] = [
        {
            "global_step": one.global_step,
            "bytes": one.nbytes,
            "saved_at": one.saved_at,
            "is_sound": one.wrong is None,
        }
        for one in listed
    ]
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    best = record["account"]["best"]
    facts["checkpoints"] = [_line(one, best) for one in listed]
    facts["account"] = Tally(record["account"]["tally"]).summary()
    facts["saved_at"] = _time(record["saved_at"])
    rows = [
        ("" if number else name, str(line))
        for name, value in facts.items()
        if value is not None
        for number, line in enumerate(value if isinstance(value, list) else [value])
    ]
    print(aligned(rows))
    return 0


def _line(one: Listed, best: dict[str, Any] | None) -> str:
    """``step 1,200  13,204,512 bytes  2026-11-21 10:02:11  sound``."""
    state = "sound" if one.wrong is None else one.wrong
    if best is not None and best["global_step"] == one.global_step:
        state += f", the best {best['metric']}: {best['value']:.4f}"
    when = "" if one.saved_at is None else _time(one.saved_at)
    return f"step {one.global_step:,}  {one.nbytes:,} bytes  {when}  {state}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
