"""The page of a report: HTML without scripts or external resources.

Every text from a file or from the user goes through ``text``.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import quorate
from quorate.commands.report.charts import (
    LAYOUTS,
    SvgCharts,
    comparison_charts,
    event_charts,
    run_charts,
)
from quorate.commands.report.comparison import LossDifference, RunComparison, all_settings, compare
from quorate.commands.report.marks import CUT, MOST_EVENTS, QUIET, Mark, lost_workers, marks
from quorate.commands.report.run_history import RunHistory, WeightsDigest, is_loss
from quorate.commands.report.sessions import FitSessions, sessions, worker_totals
from quorate.commands.report.style import STYLE_SHEET
from quorate.coordination.run_event import LOST, SLOW, WARNING
from quorate.engines.worker_status import PHASES
from quorate.machine.text import printable

MOST_WORKERS, MOST_CHECKPOINTS = 128, 100  # rows of a table
MOST_VALUE = 200  # characters of a setting

KEY = (
    ("accent", "▶", "start or resume"),
    ("bad", "✖", "run or worker killed"),
    ("good", "▲", "worker restarted"),
    ("accent", "◆", "takeover"),
    ("muted", "●", "checkpoint saved"),
    ("warn", "●", "warning or slow worker"),
)


def report(histories: Sequence[RunHistory]) -> str:
    """Return the page of one run or of two."""
    found = [sessions(history) for history in histories]
    if len(histories) == 1:
        history, one = histories[0], found[0]
        return _document(title_of(history), [*_of_one_run(history, one)])
    return _document(
        f"{title_of(histories[0])} and {title_of(histories[1])}", [*_of_two(histories, found)]
    )


def text(value: object, most: int = 2000) -> str:
    """Return a value for the page: printable, not too long, with HTML's signs escaped."""
    return html.escape(printable(value, most))


def title_of(history: RunHistory) -> str:
    """Return the script's name, or the directory's if no script is known."""
    if history.command:
        return printable(Path(history.command[0]).name, 100)
    return printable(history.run_dir.absolute().name, 100)


# --- one run --------------------------------------------------------------------------------------


def _of_one_run(history: RunHistory, found: FitSessions) -> Iterable[str]:
    of_run = marks(history, found)
    yield _header(history)
    yield _summary(history, found)
    yield from _remarks(history)
    drawn = run_charts(history, found, of_run)
    if not drawn.by_layout["wide"]:
        yield "<p>No update was logged yet: there is nothing to draw.</p>"
    else:
        yield _section("Training", _charts(drawn, of_run, with_phases=True), "training")
    yield from _details(history, found, of_run)


def _details(
    history: RunHistory, found: FitSessions, of_run: Sequence[Mark], letter: str = ""
) -> Iterable[str]:
    yield _section("Workers", _workers(history, found), f"workers{letter}")
    yield _section("Events", _events(of_run), f"events{letter}")
    yield _section("Checkpoints", _checkpoints(history), f"checkpoints{letter}")
    if not letter:
        yield _section("Settings", _settings(all_settings(history)), "settings")


def _header(history: RunHistory, letter: str = "") -> str:
    facts, command = history.facts, history.command
    badge = f'<span class="state {_tone(facts.state)}">{text(facts.state)}</span>'
    mark = f'<span class="letter {letter.lower()}">{letter}</span> ' if letter else ""
    level = "h2" if letter else "h1"
    lines = [f"<{level}>{mark}{text(title_of(history))} {badge}</{level}>"]
    where = f"<code>{text(history.run_dir.absolute())}</code>"
    words = f"<code>{text(' '.join(command))}</code>, " if command else ""
    lines.append(f'<p class="sub">{words}run directory {where}</p>')
    if facts.why:
        lines.append(f'<p class="sub">{text(facts.why)}</p>')
    return f"<header>{''.join(lines)}</header>"


def _tone(state: str) -> str:
    tones = {"finished": "good", "running": "accent", "failed": "bad", "killed": "bad"}
    return tones.get(state, "warn")


def _summary(history: RunHistory, found: FitSessions) -> str:
    facts, updates = history.facts, history.updates
    tiles: list[tuple[str, str, str]] = []
    step = "none" if facts.global_step is None else f"{facts.global_step:,}"
    of = "" if facts.last_step is None else f"of {facts.last_step:,}"
    tiles.append(("updates", step, of))
    for name in history.losses[:3]:
        curve = updates.curves[name]
        tiles.append((f"last {name}", figure(curve.values[-1]), "training"))
    shown = 0
    for evaluation in updates.evaluations[-1:]:
        for name in sorted(evaluation.metrics, key=lambda n: not is_loss(n)):
            if shown < 4:
                at = f"step {evaluation.global_step:,}"
                tiles.append((f"validation {name}", figure(evaluation.metrics[name]), at))
            shown += 1
    if facts.best is not None:
        at = f"step {facts.best['global_step']:,}"
        tiles.append((f"best {facts.best['metric']}", figure(facts.best["value"]), at))
    if found.has_times and found.listed:
        count = len(found.listed)
        in_all = f"in {count:,} session{'s' if count > 1 else ''}"
        tiles.append(("training time", duration(found.seconds), in_all))
    if (rate := _examples_per_s(history, found)) is not None:
        tiles.append(("throughput", f"{rate:,.0f}", "examples/s, mean"))
    settings = history.settings
    if workers := settings.get("workers"):
        on = " ".join(map(str, settings.get("devices") or []))
        tiles.append(("workers", f"{workers}", f"{on}, {settings.get('engine', '')}".strip(", ")))
    lost = sum(lost_workers(history).values())
    cuts = sum(mark.kind == CUT for mark in marks(history, found))
    if history.events:
        runs = f"run killed {cuts:,} time{'s' if cuts > 1 else ''}" if cuts else ""
        tiles.append(("workers lost", f"{lost:,}", runs))
    warnings = sum(event.kind == WARNING for event in history.events)
    if history.events:
        tiles.append(("warnings", f"{warnings:,}", ""))
    items = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)} <small>{text(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{items}</dl>{_identity(history)}'


def _identity(history: RunHistory) -> str:
    """Return the rows about the weights: digest, processor, whether the bits are the same."""
    rows = [("digest", _digest(history.digest, history))]
    settings = history.settings
    processors = ", ".join(map(str, settings.get("processors") or [])) or "unknown"
    software = " ".join(
        f"{name} {settings[name]}" for name in ("torch", "python") if settings.get(name)
    )
    rows.append(("processor", text(f"{processors}; {software}" if software else processors)))
    doubts = history.doubts
    if doubts is None:
        same = "unknown: no checkpoint says so"
    elif doubts:
        same = "".join(f"no, because {text(doubt)}<br>" for doubt in doubts)
    else:
        shards = settings.get("shards")
        same = f"yes: any number of workers with shards={shards}, and a resume, give these weights"
    rows.append(("same bits", same if doubts else text(same)))
    cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table class="facts">{cells}</table></div>'


def _digest(digest: WeightsDigest | None, history: RunHistory) -> str:
    if digest is None:
        return "no sound checkpoint" if history.checkpoints else "no checkpoint yet"
    averaged = ""
    if digest.averaged is not None:
        averaged = f"<br>averaged weights <code>{digest.averaged}</code>"
    return f"<code>{digest.weights}</code> at step {digest.global_step:,}{averaged}"


def _remarks(history: RunHistory, label: str = "") -> Iterable[str]:
    """Yield remarks on the files for the reader."""
    updates, lines = history.updates, []
    if updates.damaged:
        are = "line is" if updates.damaged == 1 else "lines are"
        lines.append(f"{updates.damaged:,} damaged {are} left out of metrics.jsonl.")
    if history.damaged_events:
        are = "line is" if history.damaged_events == 1 else "lines are"
        lines.append(f"{history.damaged_events:,} {are} left out of events.jsonl.")
    if updates.skipped_bytes:
        lines.append(
            f"metrics.jsonl is very long: its first {updates.skipped_bytes:,} bytes are left out."
        )
    if updates.left_out:
        lines.append("Some metrics are left out: the log has too many names.")
    if len(updates.steps) and not history.events:
        lines.append(
            "The run directory has no events.jsonl: kills, restarts and warnings of an earlier "
            "version of quorate are unknown."
        )
    if lines:
        yield f'<p class="remark">{label}{text(" ".join(lines))}</p>'


def _charts(drawn: SvgCharts, of_run: Sequence[Mark], *, with_phases: bool = False) -> str:
    parts = []
    if of_run:
        items = "".join(f'<li><b class="{c}">{sign}</b> {what}</li>' for c, sign, what in KEY)
        parts.append(f'<ul class="key">{items}</ul>')
    parts += [
        f'<div class="chart {layout.name}">{drawn.by_layout[layout.name]}</div>'
        for layout in LAYOUTS
        if drawn.by_layout.get(layout.name)
    ]
    if with_phases:
        parts.append(_phase_key())
    parts += [f'<p class="note">{text(note)}</p>' for note in drawn.notes]
    return "".join(parts)


def _phase_key() -> str:
    items = "".join(f'<li><i class="{phase}"></i>{phase}</li>' for phase in PHASES)
    return f'<ul class="key phases">{items}</ul>'


def _workers(history: RunHistory, found: FitSessions) -> str:
    totals = worker_totals(found)
    if not totals:
        return "<p>The run ended before it noted what its workers' time went into.</p>"
    lost = lost_workers(history)
    fates = {name: history.updates.fates(name) for name in ("stale", "dropped")}
    more = [name for name in fates if any(fates[name])]
    most_s = max(sum(total.seconds.values()) for total in totals) or 1.0
    heads = "".join(f'<th class="n">{phase}</th>' for phase in PHASES)
    heads += "".join(f'<th class="n">{name}</th>' for name in more)
    rows = []
    for total in totals[:MOST_WORKERS]:
        parts = "".join(
            f'<i class="{phase}" style="width:{100 * total.seconds[phase] / most_s:.2f}%" '
            f'title="{phase} {duration(total.seconds[phase])}"></i>'
            for phase in PHASES
            if total.seconds[phase] > 0
        )
        cells = "".join(f'<td class="n">{duration(total.seconds[phase])}</td>' for phase in PHASES)
        for name in more:
            of_worker = fates[name]
            count = of_worker[total.worker] if total.worker < len(of_worker) else 0
            cells += f'<td class="n">{count:,}</td>'
        rows.append(
            f'<tr><th>{total.worker}</th><td class="n">{total.shards:,}</td>'
            f'<td class="n">{lost.get(total.worker, 0):,}</td>'
            f'<td class="bar"><div>{parts}</div></td>{cells}</tr>'
        )
    head = (
        '<tr><th>worker</th><th class="n">shards</th><th class="n">lost</th>'
        f"<th>time by phase</th>{heads}</tr>"
    )
    after = _more(len(totals), MOST_WORKERS, "workers")
    if any(session.state is None and session.events for session in found.listed):
        after += (
            '<p class="note">A session that was killed counts up to its last note, at most 10 '
            "seconds before the kill.</p>"
        )
    table = f'<div class="scroll"><table class="workers">{head}{"".join(rows)}</table></div>'
    return f"{_phase_key()}{table}{after}"


def _events(of_run: Sequence[Mark]) -> str:
    if not of_run:
        return "<p>The run directory has no events.</p>"
    loud = [mark for mark in of_run if mark.kind not in QUIET]
    quiet = [mark for mark in of_run if mark.kind in QUIET]
    parts = [_event_table(loud)]
    if quiet:
        summary = f"{len(quiet):,} notes, evaluations and lines about slow workers"
        parts.append(f"<details><summary>{summary}</summary>{_event_table(quiet)}</details>")
    return "".join(parts)


def _event_table(listed: Sequence[Mark]) -> str:
    half = MOST_EVENTS // 2
    shown = [mark for mark in listed if mark.is_listed]
    rows = "".join(
        f'<tr id="{mark.row}"><td class="n">{moment(mark.at)}</td>'
        f'<td class="n">{duration(mark.x)}</td><td class="n">{mark.global_step:,}</td>'
        f'<td class="kind {text(_event_tone(mark))}">{text(mark.name)}</td>'
        f"<td>{text(mark.text)}</td></tr>"
        for mark in shown
    )
    left_out = ""
    if len(listed) > len(shown):
        count = len(listed) - len(shown)
        between = f"{count:,} events between the first {half:,} and the last {half:,}"
        left_out = f'<p class="note">{between} are left out.</p>'
    head = (
        '<tr><th class="n">time</th><th class="n">training time</th><th class="n">update</th>'
        "<th>event</th><th></th></tr>"
    )
    return f'<div class="scroll"><table class="events">{head}{rows}</table></div>{left_out}'


def _event_tone(mark: Mark) -> str:
    return {LOST: "bad", CUT: "bad", WARNING: "warn", SLOW: "warn"}.get(mark.kind, "")


def _checkpoints(history: RunHistory) -> str:
    if not history.checkpoints:
        return "<p>No checkpoint.</p>"
    best = history.facts.best
    rows = []
    for each in history.checkpoints[:MOST_CHECKPOINTS]:
        state = "record can be read" if each.record is not None else each.wrong
        if history.digest is not None and history.digest.global_step == each.global_step:
            state = "sound: every byte was checked"
        elif history.digest is None or each.global_step > history.digest.global_step:
            state = each.wrong or "damaged"
        if best is not None and best["global_step"] == each.global_step:
            state += f"; best {best['metric']}: {figure(best['value'])}"
        when = "" if each.saved_at is None else moment(each.saved_at)
        rows.append(
            f'<tr><td class="n">{each.global_step:,}</td><td class="n">{when}</td>'
            f'<td class="n">{size(each.nbytes)}</td><td>{text(state)}</td></tr>'
        )
    head = (
        '<tr><th class="n">step</th><th class="n">saved</th><th class="n">size</th><th></th></tr>'
    )
    after = _more(len(history.checkpoints), MOST_CHECKPOINTS, "checkpoints")
    after += (
        '<p class="note"><code>quorate inspect</code> checks every byte of all checkpoints.</p>'
    )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>{after}'


def _settings(settings: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{_value(value)}</td></tr>"
        for name, value in settings.items()
    )
    return f'<div class="scroll"><table class="facts settings">{rows}</table></div>'


def _value(value: Any) -> str:
    if value is None:
        return '<span class="muted">none</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return text(f"{value:,}" if type(value) is int and abs(value) >= 10_000 else value, MOST_VALUE)


# --- two runs -------------------------------------------------------------------------------------


def _of_two(histories: Sequence[RunHistory], found: Sequence[FitSessions]) -> Iterable[str]:
    comparison = compare(*histories)
    all_marks = [
        marks(history, one, letter)
        for history, one, letter in zip(histories, found, "AB", strict=True)
    ]
    yield f"<header><h1>{_verdict(comparison)}</h1>{_differences(histories, comparison)}</header>"
    columns = [
        f"<div>{_header(h, letter)}{_summary(h, s)}{''.join(_remarks(h))}</div>"
        for h, s, letter in zip(histories, found, "AB", strict=True)
    ]
    yield f'<div class="pair">{"".join(columns)}</div>'
    drawn = comparison_charts(histories, comparison)
    if drawn.by_layout["wide"]:
        yield _section("Curves", _charts(drawn, ()), "training")
    strips = event_charts(found, all_marks)
    if strips.by_layout:
        yield _section("Events in time", _charts(strips, all_marks[0] or all_marks[1]), "time")
    yield _section("Settings", _both_settings(comparison), "settings")
    columns = [
        f'<div><h2><span class="letter {letter.lower()}">{letter}</span> '
        f"{text(title_of(history))}</h2>"
        f"{''.join(_details(history, one, of_run, letter))}</div>"
        for history, one, of_run, letter in zip(histories, found, all_marks, "AB", strict=True)
    ]
    yield f'<div class="pair">{"".join(columns)}</div>'


def _verdict(comparison: RunComparison) -> str:
    if comparison.digests is not None:
        ours, theirs = comparison.digests
        return "The weights are equal" if ours == theirs else "The weights differ"
    if comparison.loss is not None:
        return "The losses differ"
    if comparison.common_updates:
        return "The losses are equal"
    return "Two runs without a common update"


def _differences(histories: Sequence[RunHistory], comparison: RunComparison) -> str:
    lines = []
    if comparison.digests is not None:
        ours, theirs = comparison.digests
        if ours == theirs:
            lines.append(
                f"Both runs have the digest <code>{ours}</code> at step "
                f"{comparison.digest_step:,}: the weights are equal, bit for bit."
            )
        else:
            lines.append(
                f"At step {comparison.digest_step:,} the digests are <code>{ours}</code> (A) and "
                f"<code>{theirs}</code> (B)."
            )
    else:
        lines.append("The runs have no sound checkpoint of the same step: digests not compared.")
    if comparison.loss is not None:
        lines.append(f"The losses first differ at step {_different(comparison.loss)}.")
    elif comparison.common_updates:
        lines.append(f"All {comparison.common_updates:,} losses that both runs have are equal.")
    else:
        lines.append("The runs have no update in common whose losses could be compared.")
    if comparison.validation is not None:
        lines.append(f"The validation first differs at step {_different(comparison.validation)}.")
    machines = [history.settings.get("processors") for history in histories]
    if machines[0] != machines[1]:
        lines.append("The processors differ, and digests depend on the processor.")
    count = len(comparison.settings)
    names = ", ".join(text(name, 60) for name, _, _ in comparison.settings[:8])
    more = ", ..." if count > 8 else ""
    lines.append(f"Settings that differ: {names}{more}." if count else "All settings are equal.")
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _different(found: LossDifference) -> str:
    a, b = found.values
    name = "" if found.name == "loss" else f"{text(found.name)}: "
    return f"{found.global_step:,}: {name}{a!r} (A) and {b!r} (B)"


def _both_settings(comparison: RunComparison) -> str:
    head = "<tr><th></th><th>A</th><th>B</th></tr>"
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{_value(ours)}</td><td>{_value(theirs)}</td></tr>"
        for name, ours, theirs in comparison.settings
    )
    parts = []
    if rows:
        table = f'<table class="facts settings differ">{head}{rows}</table>'
        parts.append(f'<div class="scroll">{table}</div>')
    else:
        parts.append("<p>All settings are equal.</p>")
    if comparison.same_settings:
        count = len(comparison.same_settings)
        equal = _settings(dict(comparison.same_settings))
        parts.append(f"<details><summary>{count:,} equal settings</summary>{equal}</details>")
    return "".join(parts)


# --- parts ----------------------------------------------------------------------------------------


def _section(title: str, content: str, anchor: str) -> str:
    return f'<section id="{anchor}"><h2>{title}</h2>{content}</section>'


def _more(count: int, most: int, what: str) -> str:
    if count <= most:
        return ""
    return f'<p class="note">{count - most:,} more {what} are left out.</p>'


def _document(title: str, parts: Sequence[str]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    footer = f"<footer>quorate {text(quorate.__version__)} report, written {made}</footer>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}: quorate report</title>\n<style>{STYLE_SHEET}</style></head>\n"
        f"<body><main>{''.join(parts)}</main>\n{footer}</body></html>\n"
    )


# --- figures --------------------------------------------------------------------------------------


def figure(value: float) -> str:
    """Return a metric in four significant digits."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time span: ``0.42 s``, ``12 s``, ``3 min 20 s``, ``5 h 07 min``, ``2 d 3 h``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def moment(at: float) -> str:
    """Return a date and time of this machine's zone."""
    try:
        return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def size(nbytes: int) -> str:
    """Return a size: ``13.2 MB``."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


def _examples_per_s(history: RunHistory, found: FitSessions) -> float | None:
    """Return rows over the time of the updates, without pauses and starts."""
    spans = [
        found.x[session.end_row - 1] - found.x[session.first_row]
        for session in found.listed
        if session.end_row > session.first_row + 1
    ]
    whole = float(sum(spans))
    if not found.has_times or whole <= 0:
        return None
    return history.updates.rows / whole
