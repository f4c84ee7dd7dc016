"""State of user code beside the model: the same bits on all engines, after a kill, elsewhere."""

import json
import signal
from pathlib import Path

import pytest
from support.references import References
from support.runs import command, digests, inspected, run

pytestmark = pytest.mark.slow

PROCESSES = ("--engine", "processes", "--workers", "2")
STAGES = ("--devices", "cpu+cpu", "--split", "4")
RANKS = ("--engine", "collective", "--workers", "2")
TOWERS = ("--engine", "towers", "--workers", "3")


def test_a_run_that_is_killed_goes_on_elsewhere(tmp_path: Path, references: References) -> None:
    """Kill in mid-epoch, two steps and one after a checkpoint; at last a single worker."""
    run_dir = ("--run-dir", str(tmp_path / "run"))
    ways = ("6", 4, RANKS), ("9", 8, STAGES), ("13", 12, TOWERS), ("-16", 25, PROCESSES)
    for kill, saved, engine in ways:
        ended = run(command("beside.py", kill, options=(*engine, *run_dir)))
        assert ended.code == (-signal.SIGKILL if saved < 25 else 0), ended.said
        assert inspected(tmp_path / "run")["global_step"] == saved, ended.said
    assert "resumed step 12 (epoch 3, 40%)" in ended.said
    assert "worker 0 was there in the end" in ended.out
    assert digests(tmp_path / "run") == references.on_a_tower("beside.py").digests
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    kinds = {json.loads(event)["kind"] for event in events}
    assert kinds >= {"start", "resume", "save", "lost", "back", "end"}
