"""The charts of a report: curves and events of a run on a common time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quorate.commands.report.comparison import RunComparison
from quorate.commands.report.marks import CUT, LANE_OF, LANES, Mark
from quorate.commands.report.run_history import Curve, RunHistory, is_loss
from quorate.commands.report.sessions import FitSessions
from quorate.commands.report.svg import COLOURS, LINK, STYLE, svg
from quorate.coordination.run_event import (
    BACK,
    END,
    JOINED,
    LOST,
    RESUME,
    SAVE,
    SLOW,
    START,
    TAKEOVER,
    WARNING,
)
from quorate.engines.worker_status import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

MOST_POINTS = 1200  # of a curve
MOST_MARKS = 400  # of a lane of events
MOST_PANELS = 8  # of metrics
LEAST_MEAN = 120  # least number of values for a running mean
MEANS = 60  # a running mean covers this fraction of a curve
TOO_LARGE = 1e100  # larger values have no place on an axis
LOG_RATIO = 30.0  # ratio from which on a loss has a logarithmic axis

SHAPES = {  # by kind: marker, size in points, colour
    START: (">", 5.0, "accent"),
    RESUME: (">", 5.0, "accent"),
    END: ("s", 4.0, "muted"),
    CUT: ("X", 6.0, "bad"),
    LOST: ("X", 6.0, "bad"),
    BACK: ("^", 5.5, "good"),
    JOINED: ("^", 5.5, "good"),
    TAKEOVER: ("D", 4.0, "accent"),
    SLOW: ("o", 3.0, "warn"),
    SAVE: ("o", 4.0, "muted"),
    WARNING: ("o", 4.5, "warn"),
}
LINES = {CUT: "bad", LOST: "bad", RESUME: "accent"}  # across all charts


class ChartLayout(NamedTuple):
    """The size of a chart, for one width of a window."""

    name: str
    inches: float  # width
    scale: float  # factor of heights
    font: float  # points
    left: float  # inches, for labels


WIDE = ChartLayout("wide", 9.6, 1.0, 8.0, 0.78)
NARROW = ChartLayout("narrow", 4.3, 0.9, 8.5, 0.72)
LAYOUTS = (WIDE, NARROW)


class Panel(NamedTuple):
    """One of several charts on a common axis."""

    title: str
    inches: float
    draw: Callable[[Axes], None]


class SvgCharts(NamedTuple):
    """Charts as SVG."""

    by_layout: dict[str, str]
    notes: list[str]  # about parts left out of the charts


class Series(NamedTuple):
    """A curve to draw."""

    x: Floats
    y: Floats
    colour: str
    label: str
    breaks: tuple[int, ...] = ()  # positions before which the line is interrupted
    is_below: bool = False  # whether the line is broad, to stay visible below another

    def parts(self, y: Floats) -> list[tuple[Floats, Floats]]:
        """Return pieces of a line over this curve's x, with few points in total."""
        pieces = zip(np.split(self.x, self.breaks), np.split(y, self.breaks), strict=True)
        share = MOST_POINTS / max(1, len(y))
        return [decimated(x, part, math.ceil(share * len(part)) + 2) for x, part in pieces]


def run_charts(history: RunHistory, found: FitSessions, marks: Sequence[Mark]) -> SvgCharts:
    """Draw the curves and events of one run on a time axis."""
    unit_s, unit = _unit(found)
    x = found.x / unit_s
    breaks = [session.first_row for session in found.listed[1:]]
    panels, notes = [], list[str]()
    if marks and found.has_times:
        panels.append(_strip(marks, unit_s, notes))
    names, updates = [*history.updates.curves], history.updates
    metrics = [name for name in names if name not in ("lr", "examples_per_s", "grad_norm")]
    metrics.sort(key=lambda name: not is_loss(name))
    validated = list(dict.fromkeys(n for e in updates.evaluations for n in e.metrics))
    metrics += [name for name in validated if name not in metrics]
    if len(metrics) > MOST_PANELS:
        left = ", ".join(metrics[MOST_PANELS:])
        notes.append(f"Metrics without a chart: {left}.")
    for name in metrics[:MOST_PANELS]:
        series = []
        if (curve := updates.curves.get(name)) is not None:
            series.append(_series(curve, x, "accent", "training", breaks))
        points = [(e, e.metrics[name]) for e in updates.evaluations if name in e.metrics]
        at = [found.place_at(e.row, e.at) / unit_s for e, _ in points]
        evaluated = Series(np.array(at), np.array([v for _, v in points]), "second", "validation")
        panels.append(_curves(name, series, [evaluated] if points else [], notes))
    steps = _steps(history, x)
    for name, title in (
        ("lr", "learning rate"),
        ("grad_norm", "norm of the gradient"),
        ("examples_per_s", "examples per second"),
    ):
        if name in updates.curves:
            series = [_series(updates.curves[name], x, "accent", "", breaks)]
            panels.append(_curves(title, series, [], notes, is_plain=True))
    if (shares := _shares(found, unit_s)) is not None:
        panels.append(shares)
    if len(x) > MOST_POINTS:
        notes.append(
            f"The curves have {len(x):,} updates, of which each chart shows the lowest and the "
            f"highest value in {MOST_POINTS // 2:,} intervals."
        )
    label = f"training time ({unit})" if found.has_times else "updates"
    end = found.seconds / unit_s if found.has_times else float(x[-1]) if len(x) else 0.0
    texts = _texts(marks)
    lines = [(m.x / unit_s, LINES[m.kind]) for m in marks if m.kind in LINES][:MOST_MARKS]
    drawn = {
        layout.name: _figure(
            panels, layout, "run", label, end, lines if found.has_times else [], steps, texts
        )
        for layout in LAYOUTS
    }
    return SvgCharts(drawn, notes)


def comparison_charts(histories: Sequence[RunHistory], comparison: RunComparison) -> SvgCharts:
    """Draw the curves of two runs over each other, on an axis of updates."""
    panels, notes = [], list[str]()
    names = list(dict.fromkeys(n for h in histories for n in h.updates.curves))
    names += [
        name
        for name in dict.fromkeys(
            n for h in histories for e in h.updates.evaluations for n in e.metrics
        )
        if name not in names
    ]
    names.sort(key=lambda name: not is_loss(name))
    last = [name for name in ("lr", "grad_norm", "examples_per_s") if name in names]
    metrics = [name for name in names if name not in last]
    if len(metrics) > MOST_PANELS:
        notes.append(f"Metrics without a chart: {', '.join(metrics[MOST_PANELS:])}.")
    titles = {
        "lr": "learning rate",
        "grad_norm": "norm of the gradient",
        "examples_per_s": "examples per second",
    }
    end = 1.0
    for name in (*metrics[:MOST_PANELS], *last):
        curves, evaluated = [], []
        for history, colour, label in zip(histories, ("accent", "second"), "AB", strict=True):
            updates = history.updates
            steps = np.array(updates.steps, dtype=np.float64)
            end = max(end, float(steps.max(initial=0.0)))
            if (curve := updates.curves.get(name)) is not None:
                one = _series(curve, steps, colour, label)
                curves.append(one._replace(is_below=label == "A"))
            points = [
                (e.global_step, e.metrics[name]) for e in updates.evaluations if name in e.metrics
            ]
            if points:
                at, values = zip(*points, strict=True)
                evaluated.append(Series(np.array(at), np.array(values), colour, ""))
        title, how = titles.get(name, name), {"is_plain": name in last, "names_mean": False}
        panels.append(_curves(title, curves, evaluated, notes, **how))
    if any(len(history.updates.steps) >= LEAST_MEAN for history in histories):
        notes.append(f"Lines are running means over 1/{MEANS} of a run. Dots are evaluations.")
    lines = [] if comparison.loss is None else [(float(comparison.loss.global_step), "bad")]
    drawn = {
        layout.name: _figure(panels, layout, "both", "updates", end, lines, [], {})
        for layout in LAYOUTS
    }
    return SvgCharts(drawn, notes)


def event_charts(found: Sequence[FitSessions], marks: Sequence[Sequence[Mark]]) -> SvgCharts:
    """Draw the events of two runs, one strip below the other."""
    longest = max(found, key=lambda one: one.seconds)
    unit_s, unit = _unit(longest)
    notes = list[str]()
    panels = [
        _strip(of_run, unit_s, notes, f"events of {label}")
        for of_run, label in zip(marks, "AB", strict=True)
        if of_run
    ]
    texts = _texts([mark for of_run in marks for mark in of_run])
    end, axis = longest.seconds / unit_s, f"training time ({unit})"
    drawn = {
        layout.name: _figure(panels, layout, "events", axis, end, [], [], texts)
        for layout in LAYOUTS
    }
    return SvgCharts(drawn if panels else {}, notes)


# --- panels ---------------------------------------------------------------------------------------


def _series(curve: Curve, x: Floats, colour: str, label: str, breaks: Sequence[int] = ()) -> Series:
    """Return a curve whose line is interrupted before each of the updates in ``breaks``."""
    rows = np.array(curve.rows)
    at = tuple(int(place) for place in np.searchsorted(rows, breaks) if 0 < place < len(rows))
    return Series(x[rows], np.array(curve.values), colour, label, at)


def _drawable(y: Floats) -> Floats:
    """Return values with nan in the place of values that no axis can show."""
    return np.where(np.abs(y) < TOO_LARGE, y, np.nan)


def _curves(
    title: str,
    series: Sequence[Series],
    points: Sequence[Series],
    notes: list[str],
    *,
    is_plain: bool = False,
    names_mean: bool = True,
) -> Panel:
    """Return the chart of a metric.

    Args:
        series: one value per update: drawn faint, with a running mean.
        points: one value per evaluation.
        notes: receives notes about parts left out of the chart.
        is_plain: whether to draw the values without a mean.
        names_mean: whether the legend states the number of updates in a mean.
    """
    series = [each._replace(y=_drawable(each.y)) for each in series]
    points = [each._replace(y=_drawable(each.y)) for each in points]
    values = np.concatenate([each.y for each in (*series, *points)] or [np.zeros(0)])
    finite = values[np.isfinite(values)]
    if len(finite) < len(values):
        missing = f"{len(values) - len(finite):,} of {len(values):,} values"
        notes.append(f"{title}: {missing} are not finite (NaN or infinite) and leave gaps.")
    is_log = (
        not is_plain
        and is_loss(title)
        and len(finite) > 0
        and float(finite.min()) > 0
        and float(finite.max()) > LOG_RATIO * float(np.median(finite))
    )

    def draw(axes: Axes) -> None:
        if is_log:
            axes.set_yscale("log")
        labels = 0
        for one in series:
            y, label = one.y, one.label
            line: Any = {"color": COLOURS[one.colour]}
            if not is_plain and len(y) >= LEAST_MEAN:
                for part in one.parts(y):
                    axes.plot(*part, alpha=0.35, linewidth=0.7, **line)
                window = len(y) // MEANS
                y = running_mean(y, window)
                if names_mean:
                    label = f"{label}, mean of {window:,} updates"
            elif np.isfinite(y).sum() < 3:
                line["marker"] = "."
            if one.is_below:
                line |= {"linewidth": 2.6, "alpha": 0.5}
            for number, part in enumerate(one.parts(y)):
                axes.plot(*part, label=label if label and number == 0 else None, **line)
            labels += bool(one.label)
        for x, y, colour, label, *_ in points:
            axes.plot(
                *decimated(x, y),
                marker="o",
                markersize=4 if len(y) < 60 else 2,
                linewidth=0.9,
                color=COLOURS[colour],
                markeredgecolor=COLOURS["page"],
                markeredgewidth=0.6,
                label=label or None,
            )
            labels += bool(label)
        if labels > 1:
            axes.legend(
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                ncols=4,
                borderpad=0,
                borderaxespad=0.15,
                handlelength=1.2,
                columnspacing=1.0,
                handletextpad=0.4,
            )
        axes.margins(y=0.08)
        if not len(finite):
            axes.set_yticks([])
        elif is_plain and float(finite.min()) >= 0:
            axes.set_ylim(0, 1.1 * float(finite.max()) or 1.0)
        if len(finite) and not is_log and float(np.abs(finite).max()) >= 2_000:
            axes.yaxis.set_major_formatter("{x:,.0f}")

    return Panel(title, 1.1 if is_plain else 2.1 if is_loss(title) else 1.5, draw)


def _strip(marks: Sequence[Mark], unit_s: float, notes: list[str], title: str = "events") -> Panel:
    """Return the chart of events: a lane of marks for each group of kinds."""
    lanes = [*LANES]
    shown: dict[str, list[Mark]] = {}
    for mark in marks:
        if mark.kind in SHAPES:
            shown.setdefault(mark.kind, []).append(mark)
    for kind, of_kind in shown.items():
        if len(of_kind) > MOST_MARKS:
            every = math.ceil(len(of_kind) / MOST_MARKS)
            notes.append(f"Of {len(of_kind):,} events {kind!r} the strip shows each {every}th.")
            shown[kind] = of_kind[::every]

    def draw(axes: Axes) -> None:
        for kind, of_kind in shown.items():
            marker, size, colour = SHAPES[kind]
            y = len(lanes) - 1 - lanes.index(LANE_OF[kind])
            drawn = axes.scatter(
                [mark.x / unit_s for mark in of_kind],
                [y] * len(of_kind),
                s=size * size,
                marker=marker,
                color=COLOURS[colour],
                linewidths=0,
                clip_on=False,
                zorder=4,
            )
            drawn.set_urls([f"{LINK}{mark.key}" for mark in of_kind])
        axes.set_yticks(range(len(lanes)), lanes[::-1])
        axes.set_ylim(-0.6, len(lanes) - 0.4)
        axes.tick_params(axis="y", length=0)

    return Panel(title, 1.05, draw)


def _texts(marks: Sequence[Mark]) -> dict[str, tuple[str | None, str]]:
    """Return the target and the text of each mark."""
    return {m.key: (m.row, f"{m.name}, step {m.global_step:,}: {m.text}") for m in marks}


def _shares(found: FitSessions, unit_s: float) -> Panel | None:
    """Return the chart of the phases' shares of the workers' time."""
    x: list[float] = []
    shares: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def add(at: float, changes: Mapping[str, float]) -> None:
        whole = sum(changes.values())
        x.append(at / unit_s)
        for phase in PHASES:
            shares[phase].append(changes[phase] / whole if whole > 0 else math.nan)

    for session in found.listed:
        begins, zero = session.offset, dict.fromkeys(PHASES, 0.0)
        before = zero
        if session.spent:
            add(begins, zero)
        for note in session.spent:
            now = {phase: sum(column) for phase, column in note.seconds.items()}
            at = session.place(note.at)
            changes = {phase: max(0.0, now[phase] - before[phase]) for phase in PHASES}
            if at > begins and sum(changes.values()) > 0:
                add(begins, changes)
                add(at, changes)
                begins, before = at, now
        if session.spent:
            add(begins, zero)
    if not x or not found.has_times:
        return None
    keep = _buckets(len(x), MOST_POINTS)

    def draw(axes: Axes) -> None:
        axes.stackplot(
            np.array(x)[keep],
            [np.nan_to_num(np.array(shares[phase])[keep]) for phase in PHASES],
            colors=[COLOURS[phase] for phase in PHASES],
            linewidth=0,
        )
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])

    return Panel("share of the workers' time by phase", 1.2, draw)


# --- a figure -------------------------------------------------------------------------------------


def _figure(
    panels: Sequence[Panel],
    layout: ChartLayout,
    name: str,
    axis: str,
    end: float,
    lines: Sequence[tuple[float, str]],
    steps: Sequence[tuple[float, str]],
    texts: Mapping[str, tuple[str | None, str]],
) -> str:
    """Draw panels below each other, and return the figure as SVG.

    Args:
        axis: label of the common axis.
        end: end of the common axis.
        lines: position and colour of lines across all panels.
        steps: position and number of updates, for a second axis below the first.
        texts: the target row and the text of each mark, by the mark's key.
    """
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    if not panels:
        return ""
    gap, top, bottom, right = 0.42, 0.28, 0.82 if steps else 0.45, 0.12
    heights = [panel.inches * layout.scale for panel in panels]
    whole = top + sum(heights) + gap * (len(panels) - 1) + bottom
    named = f"{name}-{layout.name}"
    with rc_context():
        rcdefaults()  # override the user's matplotlibrc
        rcParams.update({**STYLE, "font.size": layout.font, "svg.hashsalt": named})
        figure = Figure(figsize=(layout.inches, whole))
        FigureCanvasSVG(figure)
        at = whole - top
        shared: Axes | None = None
        for panel, height in zip(panels, heights, strict=True):
            at -= height
            width = layout.inches - layout.left - right
            axes = figure.add_axes(
                (
                    layout.left / layout.inches,
                    at / whole,
                    width / layout.inches,
                    height / whole,
                ),
                sharex=shared,
            )
            at -= gap
            shared = shared or axes
            for place, colour in lines:
                style: Any = {"linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 1.5}
                axes.axvline(place, color=COLOURS[colour], **style)
            panel.draw(axes)
            # With an explicit y, matplotlib does not measure all labels to place the title.
            axes.set_title(panel.title, loc="left", y=1.0, fontsize=layout.font + 0.5, pad=4)
            axes.tick_params(axis="x", labelbottom=panel is panels[-1], length=0)
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0 - end * 0.005, end * 1.005 or 1.0)
            axes.locator_params(axis="x", nbins=9 if layout is WIDE else 5)
        last = figure.axes[-1]
        last.set_xlabel(axis, labelpad=2)
        if steps:
            steps = steps if layout is WIDE or len(steps) <= 5 else steps[::2]
            lower = last.secondary_xaxis(-0.4 / heights[-1])
            lower.set_xticks([place for place, _ in steps], [text for _, text in steps])
            lower.tick_params(length=0)
            lower.spines["bottom"].set_visible(False)
            lower.set_xlabel("updates", labelpad=2)
        return svg(figure, named, f"{name}: {', '.join(p.title for p in panels)}", texts)


def _unit(found: FitSessions) -> tuple[float, str]:
    seconds = found.seconds
    for most, unit_s, unit in (
        (180, 1, "seconds"),
        (10_800, 60, "minutes"),
        (172_800, 3600, "hours"),
    ):
        if seconds <= most:
            return float(unit_s), unit
    return 86_400.0, "days"


def _steps(history: RunHistory, x: Floats) -> list[tuple[float, str]]:
    """Return some updates and their positions, for a second axis."""
    steps = np.array(history.updates.steps)
    if len(steps) < 2:
        return []
    span = int(steps[-1])
    each = 10 ** math.floor(math.log10(max(1, span)))
    each = next((n for n in (each, each // 2, each // 5) if n and span // n >= 3), max(1, each))
    listed: list[tuple[float, str]] = []
    for step in range(0, span + 1, each):
        row = int(np.searchsorted(steps, step))
        if row < len(x):
            listed.append((float(x[row]), f"{step:,}"))
    return listed


# --- fewer points ---------------------------------------------------------------------------------


def decimated(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return a bounded number of points of a curve: the lowest and the highest in each interval."""
    if len(y) <= most:
        return x, y
    keep: list[int] = []
    edges = np.linspace(0, len(y), most // 2 + 1).astype(int)
    for begin, end in pairwise(edges):
        part = y[begin:end]
        if np.isnan(part).all():
            keep.append(int(begin))
            continue
        keep += sorted({int(begin + np.nanargmin(part)), int(begin + np.nanargmax(part))})
    return x[keep], y[keep]


def _buckets(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return a bounded number of positions of a longer list, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def running_mean(y: Floats, window: int) -> Floats:
    """Return the mean of the finite values in a window before each value; nan without any."""
    finite = np.isfinite(y)
    with np.errstate(over="ignore"):
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    ends = np.arange(1, len(y) + 1)
    begins = np.maximum(0, ends - window)
    count = counts[ends] - counts[begins]
    with np.errstate(all="ignore"):
        mean: Floats = np.where(count > 0, (sums[ends] - sums[begins]) / count, np.nan)
    return mean
