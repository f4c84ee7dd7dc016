"""The metrics of a run as lines of JSON: ``metrics.jsonl`` in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quorate.machine.atomic_file import write_atomically
from quorate.services.report import Report


class MetricsLog:
    """A log of one JSON object per update and per evaluation; ``close`` it.

    Lines of steps after ``global_step``, which a run that was cut off may have left, are dropped:
    those steps are computed again.
    """

    def __init__(self, run_dir: Path, global_step: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        if self._path.exists():
            self._drop_after(global_step)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)  # a kill loses no line

    def update(self, report: Report) -> None:
        """Write what an update was."""
        record = dict(vars(report))
        for name in ("totals", "worker_losses", "last_step", "epochs", "ends_epoch", "eta_s"):
            del record[name]
        if not report.doubts:
            del record["doubts"]
        metrics = record.pop("metrics")
        self._write(record | {f"metric_{n}" if n in record else n: v for n, v in metrics.items()})

    def evaluation(self, global_step: int, metrics: dict[str, float]) -> None:
        """Write what the validation set gave."""
        self._write({"global_step": global_step, "validation": metrics})

    def _write(self, record: dict[str, Any]) -> None:
        known = {name: value for name, value in record.items() if value is not None}
        self._file.write(json.dumps(known) + "\n")

    def _drop_after(self, global_step: int) -> None:
        lines = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["global_step"] <= global_step:
                    lines.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill: its step is computed again, or was after the checkpoint
        write_atomically(self._path, "".join(lines))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
