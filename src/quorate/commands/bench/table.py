"""The table of a bench, and the lines below it."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.commands.bench.results import Proof, Result
from quorate.commands.bench.split import PARTS
from quorate.machine.text import aligned, three_digits
from quorate.services.display.shard_time import duration

SPREAD = 0.2  # least spread worth a line

HEADS = ("workers", "examples/s", "spread", "speed-up", "efficiency", "step", *PARTS)


def table(results: Sequence[Result]) -> str:
    """Return a row per contender; the parts are shares of a step."""
    listed = {result.contender.devices for result in results} != {None}
    heads = ("devices", *HEADS) if listed else HEADS
    rows = [_cells(result, listed) for result in results]
    return aligned([heads, *rows], right=range(len(heads)))


def below(results: Sequence[Result], same: Proof | None) -> list[str]:
    """Return the lines below: bottlenecks in words, notes, and the comparison of bits."""
    lines = []
    for result in results:
        first, *others = result.findings
        label = result.contender.label()
        lines.append(f"{label}: {first.words}")
        lines += [f"{' ' * len(label)}  also {finding.words}" for finding in others]
        lines += [f"{' ' * len(label)}  {note}" for note in result.notes]
    if (most := max(map(spread, results))) > SPREAD:
        lines.append(
            f"runs that are alike differ by up to {most:.0%}: other programs run too, or the "
            "machine drifts; more --repeats make medians steadier"
        )
    if same is not None and len(same.digests) == 1:
        lines.append(
            f"same bits: all {same.runs} runs have this digest after {same.updates} updates"
        )
        lines.append(f"  {same.digests[0]}")
    elif same is not None:
        lines.append(
            f"the bits differ after {same.updates} updates: {len(same.digests)} digests in "
            f"{same.runs} runs; what in the script is not repeatable?"
        )
    return lines


def spread(result: Result) -> float:
    """Return the difference between a contender's fastest and slowest runs, over their median."""
    return (result.fastest - result.slowest) / result.examples_per_s


def _cells(result: Result, listed: bool) -> tuple[str, ...]:
    cells = (
        str(result.contender.workers),
        three_digits(result.examples_per_s),
        f"{spread(result):.0%}" if len(result.runs) > 1 else "",
        f"{result.speed_up:.2f}",
        f"{result.efficiency:.0%}",
        duration(result.step_s),
        *(f"{result.split[part]:.1%}" for part in PARTS),
    )
    return (result.contender.devices or "the script's", *cells) if listed else cells
