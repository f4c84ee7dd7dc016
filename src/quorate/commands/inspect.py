"""``quorate inspect``: shows the state of a run, and its sound checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import Command
from quorate.errors import UserError
from quorate.machine.valid_json import dumped

if TYPE_CHECKING:
    from quorate.commands.newest_metrics import NewestMetrics
    from quorate.commands.run_facts import RunFacts
    from quorate.services.checkpoints.files import Listed

# Keys of a record that are never shown.
HIDDEN = (
    *("files", "order", "optimizer_numbers", "format"),
    *("doubts", "row_sample", "hyperparameters"),
)
OF_A_PHASE = ("name", "updates", "optimizer", "schedule", "clip_norm", "ema_decay")
OF_AN_OPTIMIZER = ("optimizer", "schedule", "clip_norm")
MOST_CHARACTERS = 2000  # of a line: a record may contain any text
NAME_WIDTH = 20  # of the first column: the same with --all and without
MOST_METRICS = 8  # in a line
MOST_CHECKPOINTS = 5  # listed without --all
IN_SUMMARY = {"digest", "averaged_digest", "checkpoints", "damaged"}  # facts that the summary shows
HELP = """Show the state of a run, and which of its checkpoints are sound.

RUN_DIR is the directory passed to Trainer or --run-dir. With --address, RUN_DIR names a detached
run on a Ray cluster. With --address alone, list all detached runs of the cluster.
"""


@click.command(
    "inspect", cls=Command, help=HELP, short_help="show the state and the checkpoints of a run"
)
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option(
    "--all", "shows_all", is_flag=True, help="also print all settings and facts of the checkpoint"
)
@click.option("--json", "as_json", is_flag=True, help="print the result as one JSON object")
@click.option("--address", metavar="HOST:PORT", help="address of a Ray cluster with detached runs")
def command(run_dir: Path | None, shows_all: bool, as_json: bool, address: str | None) -> int:
    """Print the facts of the state, and digests computed from the saved tensors.

    Raises:
        CheckpointError: there is no sound checkpoint.
        UserError: there is no such cluster or run.
    """
    if address is not None:
        from quorate.commands import detached

        if run_dir is None:
            return detached.listed(address)
        words = {"--all": shows_all, "--json": as_json}
        return detached.inspected(
            address, run_dir, [word for word, given in words.items() if given]
        )
    if run_dir is None:
        fix = "name one, as in quorate inspect runs/mine, or a cluster with --address"
        raise UserError("inspect", "no run directory is given", fix=fix)
    from quorate.commands.newest_metrics import newest_update, newest_validation
    from quorate.commands.run_facts import facts_of
    from quorate.errors import CheckpointError
    from quorate.services.checkpoints import files
    from quorate.services.run_directory.status import status_of

    # 1. Find the newest sound checkpoint.
    listed = files.listing(run_dir)
    if not listed:
        raise CheckpointError(f"no checkpoint in {run_dir}; is it a run directory?")
    sound = next((saved for saved in listed if saved.wrong is None), None)
    if sound is None:
        wrong = "; ".join(str(saved.wrong) for saved in listed)
        raise CheckpointError(f"no sound checkpoint in {run_dir}: {wrong}")
    path = sound.path
    record = files.record_of(path)
    facts: dict[str, Any] = {
        "checkpoint": str(path),
        "damaged": [saved.wrong for saved in listed if saved.wrong is not None],
    }
    facts |= {name: value for name, value in record.items() if name not in HIDDEN}
    for kind, names in (("phases", OF_A_PHASE), ("optimizers", OF_AN_OPTIMIZER)):
        if record.get(kind) is not None:
            facts[kind] = [_some(each, names) for each in record[kind]]
    for file, name in (("model", "digest"), ("averaged", "averaged_digest")):
        if f"{file}.safetensors" in record["files"]:
            facts[name] = files.digest_of(path, f"{file}.safetensors", record["order"])
    facts["checkpoints"] = [
        {
            "global_step": saved.global_step,
            "bytes": saved.nbytes,
            "saved_at": saved.saved_at,
            "is_sound": saved.wrong is None,
        }
        for saved in listed
    ]
    if "doubts" in record:  # absent from old checkpoints
        facts["doubts"] = _doubts(record)
        facts["same_bits"] = not facts["doubts"]
    # 2. Read the log and the status of the run.
    log, status = run_dir / "metrics.jsonl", status_of(run_dir)
    run = facts_of(run_dir, run_dir)
    update, validation = newest_update(log), newest_validation(log)
    script = None if status is None else status.script
    if as_json:
        facts["run"] = {
            "state": run.state,
            "why": run.why,
            "script": script,
            "update": None if update is None else _measured(update),
            "validation": None if validation is None else _measured(validation),
        }
        print(dumped(facts, indent=1))
        return 0
    # 3. Print the summary.
    summary = [
        *_rows("script", "not recorded" if script is None else _near(script)),
        *_rows("state", _state(run)),
        *_rows("step", _step(record, run)),
        *_rows("training", "no metrics.jsonl" if update is None else _metrics(update)),
        *_rows("validation", "none" if validation is None else _metrics(validation)),
        *_rows("best", _best(record["account"]["best"])),
        *_rows("setup", _setup(record)),
        *_rows("same bits", _same_bits(facts.get("doubts"), record["shards"])),
        *_rows("digest", facts["digest"]),
        *_rows("averaged_digest", facts.get("averaged_digest", [])),
        *_rows("checkpoints", _checkpoints(listed, record, shows_all=shows_all)),
        *_rows("damaged", facts["damaged"]),
    ]
    _print(summary)
    if shows_all:
        print()
        _print([row for name, value in _rest(facts, record) for row in _rows(name, value)])
    return 0


def _print(rows: Iterable[tuple[str, str]]) -> None:
    from quorate.machine.text import aligned, printable

    lines = [(name.ljust(NAME_WIDTH), printable(line, MOST_CHARACTERS)) for name, line in rows]
    print(aligned(lines))


def _rows(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a row per item of a list, the first row with the name; no row for None."""
    if value is None:
        return
    for number, line in enumerate(value if isinstance(value, list) else [value]):
        yield "" if number else name, line


# --- rows of the summary --------------------------------------------------------------------------


def _near(script: str) -> str:
    """Return the path of a script, relative if below the working directory."""
    try:
        return str(Path(script).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return script


def _state(run: RunFacts) -> str:
    from quorate.services.run_directory.status import ELSEWHERE, FAILED, KILLED, STOPPED

    state = run.state
    if state in (FAILED, KILLED, STOPPED):
        state = f"resumable ({state})"
    if state == ELSEWHERE:
        state = "running on another machine"
    return f"{state}: {run.why}" if run.why else state


def _step(record: dict[str, Any], run: RunFacts) -> str:
    n, epoch = record["global_step"], record["epoch"]
    text = f"{n:,} of {run.last_step:,}" if run.last_step else f"{n:,}"
    text += f", {epoch:,} epoch{'' if epoch == 1 else 's'} done"
    if run.global_step is not None and run.global_step > n:
        text += f"; the newest update was {run.global_step:,}, and is not saved"
    return text


def _metrics(measured: NewestMetrics) -> str:
    """Return ``step 400: loss 0.0004  accuracy 1.0000``."""
    from quorate.machine.text import in_four_places, printable

    shown = [f"{printable(n, 40)} {in_four_places(v)}" for n, v in measured.metrics.items()]
    if more := len(shown[MOST_METRICS:]):
        shown[MOST_METRICS:] = [f"and {more} more in metrics.jsonl"]
    return f"step {measured.global_step:,}: {'  '.join(shown)}"


def _measured(measured: NewestMetrics) -> dict[str, Any]:
    return {"global_step": measured.global_step, "metrics": measured.metrics}


def _best(best: dict[str, Any] | None) -> str:
    from quorate.machine.text import in_four_places

    if best is None:
        return "none kept; Validation(best='min:loss') keeps the best checkpoint"
    return f"{best['metric']} {in_four_places(best['value'])} at step {best['global_step']:,}"


def _setup(record: dict[str, Any]) -> str:
    """Return ``256 rows = 4 shards, sync, fp32; 2 workers on cpu (processes)``."""
    shards = record["shards"]
    text = f"{record['batch_size']:,} rows = {shards:,} shard{'' if shards == 1 else 's'}"
    text += "".join(f", {record[name]}" for name in ("update", "precision") if record.get(name))
    workers = record.get("workers")
    if workers is not None:
        text += f"; {workers:,} worker{'' if workers == 1 else 's'}"
        if devices := record.get("devices"):
            text += f" on {', '.join(devices)}"
        if engine := record.get("engine"):
            text += f" ({engine})"
    return text


def _same_bits(doubts: list[str] | None, shards: int) -> Any:
    if doubts is None:
        return None
    return [f"no, because {doubt}" for doubt in doubts] or f"yes, with shards={shards}"


def _checkpoints(listed: Sequence[Listed], record: dict[str, Any], *, shows_all: bool) -> list[str]:
    best = record["account"]["best"]
    lines = [_line(saved, best) for saved in listed]
    if shows_all or len(lines) <= MOST_CHECKPOINTS:
        return lines
    return [*lines[:MOST_CHECKPOINTS], f"and {len(lines) - MOST_CHECKPOINTS} older ones: --all"]


# --- the rest -------------------------------------------------------------------------------------


def _rest(facts: dict[str, Any], record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the remaining facts of the checkpoint, by the names used with --json."""
    from quorate.coordination.tally import Tally

    facts = {name: value for name, value in facts.items() if name not in IN_SUMMARY}
    if "optimizers" in facts:
        facts["optimizers"] = [*map(_optimizer, facts["optimizers"])]
    if "phases" in facts:
        facts["phases"] = [*map(_phase, facts["phases"])]
        facts["round"] = " ".join(record["round"]["phases"])
    facts["account"] = Tally(record["account"]["tally"]).summary()
    facts["saved_at"] = _time(record["saved_at"])
    if (said := _same_bits(facts.pop("doubts", None), facts["shards"])) is not None:
        facts["same_bits"] = said
    yield from facts.items()


def _doubts(record: dict[str, Any]) -> list[str]:
    """Return why the bits may differ with another number of workers, or after a resume."""
    from quorate.coordination import rules

    doubts = [str(doubt) for doubt in record["doubts"]]
    if not rules.keeps_bits(rules.parse(record["update"]), record["shards"]):
        doubts.insert(0, f"update={record['update']}: they depend on timing")
    return doubts


def _some(entry: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return some values of a phase or an optimizer, and of each optimizer of its list."""
    some = {name: entry.get(name) for name in names}
    if entry.get("optimizers") is not None:
        some["optimizers"] = [_some(each, OF_AN_OPTIMIZER) for each in entry["optimizers"]]
    return some


def _phase(phase: dict[str, Any]) -> str:
    """Return ``g: 1,200 updates, Adam, StepLR, clip_norm 1.0``."""
    made = f"{phase['name']}: {phase['updates']:,} updates, {_optimizer(phase)}"
    each = [_optimizer(optimizer) for optimizer in phase.get("optimizers", ())]
    return f"{made} ({'; '.join(each)})" if each else made


def _optimizer(saved: dict[str, Any]) -> str:
    """Return ``Adam, StepLR, clip_norm 1.0``."""
    said = [saved["optimizer"], saved["schedule"]]
    said += [f"{name} {saved[name]}" for name in ("clip_norm", "ema_decay") if saved.get(name)]
    return ", ".join(word for word in said if word)


def _line(saved: Listed, best: dict[str, Any] | None) -> str:
    """Return ``step 1,200  13,204,512 bytes  2026-11-21 10:02:11  sound``."""
    from quorate.machine.text import in_four_places

    state = "sound" if saved.wrong is None else saved.wrong
    if best is not None and best["global_step"] == saved.global_step:
        state += f", the best {best['metric']}: {in_four_places(best['value'])}"
    when = "" if saved.saved_at is None else _time(saved.saved_at)
    return f"step {saved.global_step:,}  {saved.nbytes:,} bytes  {when}  {state}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
