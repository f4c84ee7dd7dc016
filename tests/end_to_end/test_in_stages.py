"""Workers in stages, as processes of a run: one digest, and each stage in the trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import traces
from support.references import References
from support.runs import command, digests, inspected, run, run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="stages are for Linux"),
]

STAGES = ("--devices", "cpu+cpu", "--split", "embedding")


def test_one_digest_in_one_piece_and_in_stages(tmp_path: Path, references: References) -> None:
    variants = {
        "two workers": (*STAGES, "--workers", "2", "--trace", str(tmp_path / "trace.json")),
        "three stages": (
            *("--devices", "cpu+cpu+cpu", "--split", "embedding,dropout"),
            *("--pipeline", "zero-bubble"),
        ),
    }
    ended = run_all(
        {
            name: command("everything.py", options=(*options, "--run-dir", str(tmp_path / name)))
            for name, options in variants.items()
        }
    )
    # Begun in one piece, it goes on in stages.
    first = command("everything.py", "0", "7", options=("--run-dir", str(tmp_path / "resumed")))
    then = command("everything.py", options=(*STAGES, "--run-dir", str(tmp_path / "resumed")))
    ended |= {"first": run(first), "then": run(then)}
    expected = references.on_a_tower("everything.py").digests
    for name, each in ended.items():
        assert each.code == 0, (name, each.said)
    for name in (*variants, "resumed"):
        assert digests(tmp_path / name) == expected, name
    assert inspected(tmp_path / "two workers")["devices"] == ["cpu+cpu"]
    # Each stage of each worker has a row in the trace, with all shards of its worker.
    written = traces.read(tmp_path / "trace.json")
    rows = {name for name in written.names.values() if "stage" in name}
    assert rows == {f"worker {n}: stage {stage}" for n in range(2) for stage in range(2)}
    spans = written.of("training", "backward")
    computed = {(span.step, span.shard) for span in spans}
    for stage in range(2):
        own = (s for s in spans if written.names[s.process, s.thread].endswith(f"stage {stage}"))
        assert {(span.step, span.shard) for span in own} == computed
