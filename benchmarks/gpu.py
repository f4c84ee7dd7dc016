"""What only a GPU can answer: same bits, speed, memory, a kill. Writes its section of gpu.md.

    python benchmarks/gpu.py [--rounds 5] [--out benchmarks/gpu.md] [--json FILE]
    python benchmarks/gpu.py --devices cpu --quick     # a trial of this script, without a GPU

Two networks: the seed network (256 rows per update) and that of examples/chatbot (64 pairs of 12
and 16 made words). Every measurement is a process of its own. Speeds: rounds are interleaved,
medians are shown; each step ends with reading the loss, as people's loops do; the device is waited
for before the clock is read. Both sides of a comparison have the same loss function, optimizer,
rows and precision: fp32 is without TF32, bf16 is autocast in the hand-written loops, "bf16-mixed"
in Fabric (pip install lightning-fabric), and working copies in quorate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from on_gpu.loops import by_hand, with_fabric
from on_gpu.tables import SECTIONS, Options
from on_gpu.trainings import bits, bounded, killed, with_quorate

import quorate
from quorate.machine.gpu_identity import mapping

MARK = "<!-- Whatever follows is written by benchmarks/gpu.py. -->"


ROLES: dict[str, Callable[..., Any]] = {
    "by hand": by_hand,
    "fabric": with_fabric,
    "quorate": with_quorate,
    "bits": bits,
    "killed": killed,
    "bounded": bounded,
}


def machine(device: torch.device) -> str:
    """What it was measured on."""
    if device.type != "cuda":
        return f"a trial of the script on {device}: nothing here is about a GPU"
    import pynvml

    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    name = torch.cuda.get_device_name(device)
    where = "".join(f" ({line})" for line in mapping([device]))
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set")
    return (
        f"{name}{where}, driver {driver}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, CUBLAS_WORKSPACE_CONFIG {workspace}"
    )


def write(out: Path, text: str) -> None:
    """Put a section into the file, in the place of the last one."""
    before = out.read_text().partition(MARK)[0] if out.exists() else ""
    with tempfile.NamedTemporaryFile("w", dir=out.parent, delete=False) as new:
        new.write(f"{before}{MARK}\n\n{text}\n")
    Path(new.name).replace(out)


def main() -> None:
    """Run all sections, and print and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cuda:0", help="one device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="that are timed")
    parser.add_argument("--updates", type=int, default=100, help="before digests are compared")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of them, with commas")
    parser.add_argument("--quick", action="store_true", help="as little as tries everything")
    parser.add_argument("--out", type=Path, help="a file whose last section is replaced")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        arguments = json.loads(given.role)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        role, device = ROLES[arguments.pop("role")], torch.device(arguments.pop("device"))
        print(json.dumps(role(device=device, **arguments)))
        return
    device = torch.device(given.devices)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here (see quorate doctor); --devices cpu tries the script")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    if device.type != "cuda" and given.out:
        parser.error("--out is for the figures of a GPU")
    raw: dict[str, Any] = {}
    options = Options(
        device,
        rounds=1 if given.quick else given.rounds,
        steps=2 if given.quick else given.steps,
        updates=4 if given.quick else given.updates,
        precisions=("fp32",) if given.quick and device.type == "cpu" else ("fp32", "bf16"),
        is_quick=given.quick,
        raw=raw,
    )
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    lines = [
        f"## Measured {date.today()}\n",
        f"`{command}`: {machine(device)}, torch {torch.__version__}, quorate "
        f"{quorate.__version__}.\n",
    ]
    print("\n".join(lines), flush=True)
    for name in given.sections.split(","):
        for line in SECTIONS[name](options):
            lines.append(line)
            print(line, flush=True)
        lines.append("")
        print(flush=True)
    if given.out:
        write(given.out, "\n".join(lines).rstrip())
    if given.json:
        given.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
