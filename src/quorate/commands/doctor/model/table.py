"""The report of a doctor on a model: the costs of parts, the fit on a device, cuts for two.

Pure. The bytes of a stage are its parameters, gradients and optimizer state, and for each shard in
flight the activations kept for backward and handed on. The working memory of operators comes on
top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quorate.commands.doctor.model.measured import ModelMeasurements
from quorate.machine.text import aligned
from quorate.replica.pipeline.balance import memory
from quorate.replica.pipeline.chosen import size
from quorate.replica.pipeline.measure import Cost

HEADS = (
    *("from module", "forward", "backward", "parameters", "gradients", "optimizer"),
    *("activations", "passed on"),
)


def shown(measured: ModelMeasurements, title: str) -> str:
    """Return the whole text.

    Args:
        measured: the measurements of the model.
        title: the script and its arguments.
    """
    calls = "" if measured.calls == 1 else f", called {measured.calls} times"
    lines = [
        f"{title}: time and memory of one shard of {measured.rows} rows on {measured.device}{calls}"
    ]
    lines.append("")
    if measured.costs:
        rows = [_row(measured, n, cost) for n, cost in enumerate(measured.costs)]
        lines += [aligned([HEADS, *rows]), ""]
    return "\n".join([*lines, *said(measured)])


def fits(measured: ModelMeasurements) -> bool:
    """Return whether one device, or two after a cut, have room for the model."""
    has = measured.memory_bytes
    if has is None:
        return True
    if not measured.costs:
        return measured.parameter_bytes + measured.trained_bytes + measured.optimizer_bytes <= has
    factor = measured.state_factor
    return (
        memory(measured.costs, 1, factor) <= has
        or measured.pieces.balanced(2, has, factor) is not None
    )


def said(measured: ModelMeasurements) -> Iterator[str]:
    """Yield the conclusions, in lines."""
    trained = measured.trained_bytes
    fixed = measured.parameter_bytes + trained + measured.optimizer_bytes
    has = measured.memory_bytes
    if not measured.costs:
        yield f"1 device: needs {size(fixed)} and the activations of a shard{_of(fixed, has)}"
        yield f"the model cannot be cut: {measured.why_not}"
        return
    whole = memory(measured.costs, 1, measured.state_factor)
    yield f"1 device: needs {size(whole)}{_of(whole, has)}"
    for devices in (2, 3, 4):
        limit = float("inf") if has is None else float(has)
        split = measured.pieces.balanced(devices, limit, measured.state_factor)
        if split is None:
            if devices == 2:
                few = len(measured.costs) < devices
                yield f"{devices} devices: " + (
                    "the model has a single part" if few else "no cut of the model fits them"
                )
            continue
        yield f"{devices} devices: {_cut(measured, split)}"


def _cut(measured: ModelMeasurements, split: Sequence[str]) -> str:
    runs = measured.pieces.runs(split)
    total = sum(cost.seconds for cost in measured.costs) or 1.0
    sizes = [
        memory(run, len(runs) - number, measured.state_factor) for number, run in enumerate(runs)
    ]
    shares = [sum(cost.seconds for cost in run) / total for run in runs]
    return (
        f"cut before {_listed(split)}: {' + '.join(map(size, sizes))}, "
        f"{' + '.join(f'{share:.0%}' for share in shares)} of the time"
    )


def _listed(names: Sequence[str]) -> str:
    """Return names in a list: ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _row(measured: ModelMeasurements, number: int, cost: Cost) -> tuple[str, ...]:
    state = cost.trained_bytes * measured.state_factor
    sizes = cost.parameter_bytes, cost.trained_bytes, state, cost.kept_bytes, cost.given_bytes
    times = (f"{1e3 * seconds:.2f} ms" for seconds in (cost.forward_s, cost.backward_s))
    return ("the start", *measured.names)[number], *times, *map(size, sizes)


def _of(needed: float, has: int | None) -> str:
    if has is None:
        return ""
    return f", has {size(has)}: {'it fits' if needed <= has else 'it does not fit'}"
