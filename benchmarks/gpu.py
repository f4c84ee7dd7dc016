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
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "chatbot"))
from data import Batch
from loss import Loss
from model import Seq2Seq
from seed_network import WARM_UP, Net, data, loss, sgd, timed, void

import quorate
from quorate.machine.gpu_identity import mapping
from quorate.replica.digest import digest

MIB = 1 << 20
MARK = "<!-- Whatever follows is written by benchmarks/gpu.py. -->"
PRECISIONS = ("fp32", "bf16", "fp16")
SHARDS = 4
TOWERS = (1, 2, 4)
LIMIT_S = 1800  # of one measurement: compiling takes minutes


class Work(NamedTuple):
    """A network, its data and how it is trained."""

    network: Callable[[], nn.Module]
    loss: Callable[[Any, Any], dict[str, Any]]
    optimizer: Callable[..., torch.optim.Optimizer]
    tensors: Callable[[], tuple[torch.Tensor, ...]]
    rows: int  # per update


def pairs() -> tuple[torch.Tensor, ...]:
    """Questions (6400, 12) and answers (6400, 17) of random words, none of them special."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6400, 12), (6400, 17))
    return tuple(torch.randint(5, 4000, shape, generator=generator) for shape in shapes)


def pairs_loss(model: Any, batch: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The chatbot's own loss; it needs a vocabulary only to evaluate."""
    questions, answers = batch
    return Loss(None, "zh")(model, Batch(questions, questions, answers))  # type: ignore[arg-type]


def adam(params: Any, **options: bool) -> torch.optim.Optimizer:
    """The chatbot's optimizer."""
    return torch.optim.Adam(params, lr=1e-3, **options)


WORKS = {
    "seed": Work(Net, loss, sgd, data, 256),
    "chatbot": Work(lambda: Seq2Seq(4000), pairs_loss, adam, pairs, 64),
}


# --- by hand, and with Fabric ---------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def batches(work: Work) -> Iterator[list[torch.Tensor]]:
    """Shuffled rows on the host, for ever."""
    tensors = work.tensors()
    while True:
        order = torch.randperm(len(tensors[0]))
        for rows in order.split(work.rows)[: len(order) // work.rows]:
            yield [tensor[rows] for tensor in tensors]


def by_hand(name: str, device: torch.device, precision: str, how: str, steps: int) -> float:
    """Examples per second of the loop that people write; ``how``: "", "tuned" or "compile"."""
    work, tuned = WORKS[name], how == "tuned"
    model = work.network().to(device)
    if tuned:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = work.optimizer(model.parameters(), **({"fused": True} if tuned else {}))
    called: Any = torch.compile(model) if how == "compile" else model
    each = batches(work)

    def operations() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    def step() -> None:
        batch = [tensor.to(device, non_blocking=True) for tensor in next(each)]
        optimizer.zero_grad()
        with operations():
            value = work.loss(called, batch)["loss"]
        value.backward()
        optimizer.step()
        value.item()

    def wait() -> None:
        synchronize(device)

    return timed(step, work.rows, steps, wait, wait)


def with_fabric(name: str, device: torch.device, precision: str, steps: int) -> float:
    """Examples per second of Lightning Fabric on one device."""
    from lightning_fabric import Fabric

    work = WORKS[name]
    fabric = Fabric(
        accelerator=device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision],
    )
    fabric.launch()
    network = work.network()
    model, optimizer = fabric.setup(network, work.optimizer(network.parameters()))
    model.mark_forward_method("logits") if name == "chatbot" else None
    each = batches(work)

    def step() -> None:
        batch = fabric.to_device(next(each))
        optimizer.zero_grad()
        with fabric.autocast():
            value = work.loss(model, batch)["loss"]
        fabric.backward(value)
        optimizer.step()
        value.item()

    def wait() -> None:
        synchronize(device)

    return timed(step, work.rows, steps, wait, wait)


# --- quorate --------------------------------------------------------------------------------------


def trainer(name: str, **options: Any) -> quorate.Trainer:
    """Of a work."""
    work = WORKS[name]
    settings = {"batch_size": work.rows, "loss": work.loss} | options
    return quorate.Trainer(work.network, optimizer=work.optimizer, **settings)


def with_quorate(name: str, device: torch.device, precision: str, how: str, steps: int) -> float:
    """Examples per second of one tower."""
    work = WORKS[name]
    one = trainer(
        name,
        devices=str(device),
        shards=1,
        precision=precision,
        compute=quorate.Compute(compile=how == "compile"),
    )
    updates = one.updates(TensorDataset(*work.tensors()), steps=WARM_UP + steps)

    def wait() -> None:
        synchronize(device)

    try:
        return timed(lambda: void(next(updates).loss), work.rows, steps, wait, wait)
    finally:
        updates.close()


def bits(name: str, device: torch.device, steps: int, **options: Any) -> str:
    """The digest after so many updates."""
    workers = quorate.Workers(options.pop("workers"), engine=options.pop("engine"))
    compute = quorate.Compute(compile=options.pop("compile", False))
    settings = {"devices": str(device), "workers": workers, "compute": compute} | options
    one = trainer(name, shards=SHARDS, **settings)
    for _ in one.updates(TensorDataset(*WORKS[name].tensors()), steps=steps):
        pass
    return of(one)


def of(one: quorate.Trainer) -> str:
    """The digest of what a trainer has trained."""
    return digest(one.model.state_dict().items())


def killed(name: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Kill one of two worker processes with signal 9 and go on until there are two again.

    The digest is that after ``steps`` updates; seconds from the kill to the next update, and to an
    update to which the new process has brought a shard.
    """
    one = trainer(
        name, devices=str(device), workers=quorate.Workers(2, engine="processes"), shards=SHARDS
    )
    found: dict[str, Any] = {}
    at, old = 0.0, 0
    begun: int | None = None  # shards of the new process when it was first seen

    def kill() -> None:
        nonlocal at
        at = time.monotonic()
        os.kill(old, signal.SIGKILL)

    dataset = TensorDataset(*WORKS[name].tensors())
    for number, _ in enumerate(one.updates(dataset, steps=10**9), start=1):
        now = time.monotonic()
        victim = one.workers[1]
        if number == steps // 2:
            assert victim.pid is not None
            old = victim.pid
            threading.Timer(0.01, kill).start()  # while a shard is computed
        if at and "next_s" not in found:
            found["next_s"] = now - at
        if number == steps:
            found["digest"] = of(one)
        if at and victim.pid not in (None, old) and "back_s" not in found:
            begun = victim.shards if begun is None else begun
            if victim.shards > begun:
                found["back_s"] = now - at
        if "back_s" in found and "digest" in found:
            break
    return found


def bounded(
    device: torch.device, steps: int, fraction: float, workers: int, rows: int
) -> dict[str, Any]:
    """Worker processes with a bound on memory; ``rows`` of them fit, or do not."""
    total = 0
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory

    def watched(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = dict(loss(model, batch))
        if total:
            found["reserved_mib"] = torch.cuda.max_memory_reserved(device) / MIB
        return found

    one = trainer(
        "seed",
        loss=watched,
        batch_size=rows,
        shards=workers,
        devices=str(device),
        workers=quorate.Workers(workers, engine="processes", memory_fraction=fraction),
    )
    images, labels = data()
    times = -(-rows // len(images))
    dataset = TensorDataset(images.repeat(times, 1, 1, 1), labels.repeat(times))
    most = 0.0
    try:
        for report in one.updates(dataset, steps=steps):
            most = max(most, report.metrics.get("reserved_mib", 0.0))
    except Exception as error:
        said = [str(error), *getattr(error, "__notes__", [])]
        notes = [each for each in said if "quorate: out of memory" in each]
        if not notes and not isinstance(error, torch.OutOfMemoryError):
            raise
        return {"error": type(error).__name__, "note": notes[0] if notes else None}
    return {"reserved_mib": most, "bound_mib": fraction * total / MIB}


ROLES: dict[str, Callable[..., Any]] = {
    "by hand": by_hand,
    "fabric": with_fabric,
    "quorate": with_quorate,
    "bits": bits,
    "killed": killed,
    "bounded": bounded,
}


# --- the rounds -----------------------------------------------------------------------------------


class Failed(NamedTuple):
    """A measurement that could not be made: what its process raised."""

    why: str

    def __str__(self) -> str:
        return f"failed: {self.why}"


def measured(role: str, **arguments: Any) -> Any:
    """What a role returns, computed by a process of its own."""
    words = [sys.executable, __file__, "--role", json.dumps({"role": role, **arguments})]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Failed(f"no end within {LIMIT_S} s")
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        raised = [
            line for line in ended.stderr.splitlines() if re.match(r"[\w.]+(Error|Exit)\b", line)
        ]
        return Failed((raised or [f"exit code {ended.returncode}"])[-1])
    return json.loads(ended.stdout.splitlines()[-1])


class Options(NamedTuple):
    """How much is measured."""

    device: torch.device
    rounds: int
    steps: int  # that are timed
    updates: int  # before digests are compared
    precisions: Sequence[str]
    is_quick: bool
    raw: dict[str, Any]  # kept for --json


def same_bits(options: Options) -> Iterator[str]:
    """The table of digests."""
    yield f"Digests after {options.updates} updates of {SHARDS} shards (first 12 digits):\n"
    yield "| network | precision | compile | workers on one device | digest | same bits |"
    yield "|---|---|---|---|---|---|"
    ways: list[dict[str, Any]] = [{"engine": "towers", "workers": n} for n in TOWERS]
    ways += [{"engine": "processes", "workers": n} for n in (1, 2)]
    if options.is_quick:
        ways = [ways[0], ways[1], ways[-1]]
    for name in WORKS:
        for precision in PRECISIONS:
            if precision == "fp16" and options.device.type == "cpu":
                continue  # some of its layers have no kernel for it there
            for compiled in (False, True):
                if compiled and options.is_quick and (name, precision) != ("seed", "fp32"):
                    continue
                found = {}
                for way in ways:
                    if compiled and way["engine"] == "processes":
                        continue  # compiling takes long
                    label = f"{way['workers']} {way['engine']}"
                    found[label] = measured(
                        "bits",
                        name=name,
                        device=str(options.device),
                        steps=options.updates,
                        precision=precision,
                        compile=compiled,
                        **way,
                    )
                digests = set(map(str, found.values()))
                broken = [value for value in found.values() if isinstance(value, Failed)]
                same = "yes" if len(digests) == 1 and not broken else "**no**"
                shown = " / ".join(
                    str(value) if isinstance(value, Failed) else value[:12]
                    for value in dict.fromkeys(found.values())
                )
                options.raw[f"bits {name} {precision} {compiled}"] = {
                    label: str(value) for label, value in found.items()
                }
                onoff = "on" if compiled else "off"
                yield f"| {name} | {precision} | {onoff} | {', '.join(found)} | {shown} | {same} |"


def speed(options: Options) -> Iterator[str]:
    """The table of examples per second."""
    contenders: dict[str, tuple[str, dict[str, str]]] = {
        "by hand": ("by hand", {"how": ""}),
        "by hand, channels_last and fused": ("by hand", {"how": "tuned"}),
        "by hand, torch.compile": ("by hand", {"how": "compile"}),
        "Lightning Fabric": ("fabric", {}),
        "quorate": ("quorate", {"how": ""}),
        "quorate, compile": ("quorate", {"how": "compile"}),
    }
    yield f"Examples per second, medians of {options.rounds} rounds (least to most):\n"
    yield "| network | precision | | examples/s | quorate / it | quorate, compile / it |"
    yield "|---|---|---|---|---|---|"
    for name in WORKS:
        for precision in options.precisions:
            found: dict[str, list[float]] = {label: [] for label in contenders}
            why: dict[str, Failed] = {}
            for _ in range(options.rounds):
                for label, (role, more) in contenders.items():
                    if label in why:
                        continue
                    value = measured(
                        role,
                        name=name,
                        device=str(options.device),
                        precision=precision,
                        steps=options.steps,
                        **more,
                    )
                    if isinstance(value, Failed):
                        why[label] = value
                    else:
                        found[label].append(value)
            options.raw[f"speed {name} {precision}"] = found
            for label, values in found.items():
                if label in why:
                    yield f"| {name} | {precision} | {label} | {why[label]} | | |"
                    continue
                middle = statistics.median(values)
                ratios = [ratio(found[ours], values) for ours in ("quorate", "quorate, compile")]
                yield (
                    f"| {name} | {precision} | {label} | {middle:,.0f} "
                    f"({min(values):,.0f} to {max(values):,.0f}) | {' | '.join(ratios)} |"
                )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the ratios within a round."""
    if len(ours) != len(theirs):
        return ""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


def memory(options: Options) -> Iterator[str]:
    """Whether a bound is held, by one and by several workers on one device."""
    yield "Memory of worker processes with a bound (`memory_fraction`):\n"
    # A row takes some 0.6 MiB in float32: 2,048 fit into half of most GPUs' memory, and 25,600 into
    # half a percent of none.
    fits, too_many = (2048, 25_600) if options.device.type == "cuda" else (64, 128)
    tried = ((1, 0.5, fits), (2, 0.4, fits), (4, 0.2, fits), (1, 0.005, too_many))
    for workers, fraction, rows in tried[-2:] if options.is_quick else tried:
        found = measured(
            "bounded",
            device=str(options.device),
            steps=3,
            fraction=fraction,
            workers=workers,
            rows=rows,
        )
        options.raw[f"memory {workers} x {fraction}"] = str(found)
        said = f"* {workers} x {fraction:g}, {rows:,} rows: "
        if isinstance(found, Failed):
            yield f"{said}{found}"
        elif "error" in found:
            yield f"{said}{found['error']}; {found['note'] or '**without a note**'}"
        elif options.device.type == "cuda":
            held = found["reserved_mib"] <= found["bound_mib"]
            yield (
                f"{said}at most {found['reserved_mib']:,.0f} MiB reserved, mean over workers, of "
                f"{found['bound_mib']:,.0f} MiB: {'held' if held else '**not held**'}"
            )
        else:
            yield f"{said}trained (a CPU has no bound)"


def kill(options: Options) -> Iterator[str]:
    """A kill -9 of one of two worker processes on one device."""
    name, device = "seed", str(options.device)
    whole = measured("bits", name=name, device=device, steps=options.updates)
    found = [
        measured("killed", name=name, device=device, steps=options.updates)
        for _ in range(options.rounds)
    ]
    options.raw["kill"] = [str(each) for each in found]
    yield f"`kill -9` of one of two worker processes on one device, {options.rounds} times:\n"
    for each in found:
        if isinstance(each, Failed):
            yield f"* {each}"
    sound = [each for each in found if not isinstance(each, Failed)]
    if sound:
        same = sum(each["digest"] == whole for each in sound)
        nexts, backs = ([each[what] for each in sound] for what in ("next_s", "back_s"))
        yield f"* digest of the undisturbed run: {same} of {len(found)}"
        yield f"* next update after {statistics.median(nexts):.2f} s (worst {max(nexts):.2f} s)"
        yield f"* both compute after {statistics.median(backs):.2f} s (worst {max(backs):.2f} s)"


def tests(options: Options) -> Iterator[str]:
    """The last line of the tests that want a GPU."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]
    folder = Path(__file__).parent.parent
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    options.raw["tests"] = ended.stdout
    last = (ended.stdout.strip().splitlines() or ["nothing was said"])[-1]
    yield f"`python -m pytest -m gpu`: exit code {ended.returncode}, {last}"


SECTIONS: dict[str, Callable[[Options], Iterator[str]]] = {
    "bits": same_bits,
    "speed": speed,
    "memory": memory,
    "kill": kill,
    "tests": tests,
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
