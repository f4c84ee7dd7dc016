"""``quorate inspect``: the state of a run, from its newest sound checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import CheckpointError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]


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
    from quorate import checkpoint
    from quorate.digest import digest

    found = checkpoint.find(options.run_dir)
    if found is None:
        raise CheckpointError(f"no checkpoint in {options.run_dir}; is it a run directory?")
    path, record, passed_over = found
    hidden = ("files", "order", "optimizer_numbers", "format")
    facts: dict[str, Any] = {"checkpoint": str(path), "damaged": passed_over}
    facts |= {name: value for name, value in record.items() if name not in hidden}
    for file, name in (("model", "digest"), ("averaged", "averaged_digest")):
        if f"{file}.safetensors" in record["files"]:
            tensors = checkpoint.tensors(path, f"{file}.safetensors")
            facts[name] = digest((key, tensors[key]) for key in record["order"])
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            if value == []:
                continue
            shown = ", ".join(value) if isinstance(value, list) else value
            print(f"{name:{width}}  {shown}")
    return 0
