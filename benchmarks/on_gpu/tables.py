"""Tables: digests, speed, memory, a kill, and the tests that want a GPU."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from on_gpu.measured import Failed, measured
from on_gpu.trainings import SHARDS
from on_gpu.works import WORKS

PRECISIONS = ("fp32", "bf16", "fp16")
TOWERS = (1, 2, 4)


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
    alone = {"engine": "towers", "workers": 1}
    whole = measured("bits", name=name, device=device, steps=options.updates, **alone)
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
    folder = Path(__file__).parents[2]
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
