"""The table of what was measured, a row for each contender."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from on_gpu.measurements import Measurement, Result
from on_gpu.process import Failed

HEAD = (
    "| measurement | network | how | contender | result | beside the first | memory, MiB |\n"
    "|---|---|---|---|---|---|---|"
)
DIGITS = 12  # of a digest
MOST = 160  # characters of a failure


def rows(measurement: Measurement, results: dict[str, Result]) -> Iterator[str]:
    """Yield the rows of a measurement."""
    first = next(iter(results.values()))
    for words, result in results.items():
        cells = [measurement.name, measurement.network, measurement.how, words]
        if isinstance(result, Failed):
            cells += [f"failed: {result.why[:MOST].replace('|', '/')}", "", ""]
        elif "digest" in result:
            cells += [_digest(result), _same(result, first), ""]
        else:
            memory = result["memory_mib"]
            shown = "" if memory is None else f"{memory:,.0f}"
            cells += [_speed(result["examples_per_s"]), _ratio(result, first), shown]
        yield f"| {' | '.join(cells)} |"


def left_out(measurements: list[str]) -> str:
    """Return the line below the table."""
    return f"Left out, as the time was over: {'; '.join(measurements) or 'nothing'}."


def _speed(speeds: list[float]) -> str:
    middle, least, most = statistics.median(speeds), min(speeds), max(speeds)
    return f"{middle:,.1f} examples/s ({least:,.1f} to {most:,.1f})"


def _ratio(result: Result, first: Result) -> str:
    """Return the median of the ratios within a round."""
    if isinstance(result, Failed) or isinstance(first, Failed):
        return ""
    pairs = zip(result["examples_per_s"], first["examples_per_s"], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def _digest(result: Result) -> str:
    assert not isinstance(result, Failed)
    said = str(result["digest"])[:DIGITS]
    if "next_update_s" in result:
        said += f", next update after {result['next_update_s']:.2f} s"
        said += f", both workers again after {result['both_again_s']:.2f} s"
    return said


def _same(result: Result, first: Result) -> str:
    if isinstance(result, Failed) or isinstance(first, Failed):
        return ""
    return "same bits" if result["digest"] == first["digest"] else "**other bits**"
