"""Workers in stages, as processes of a run: one digest, and each stage in the trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import traces
from support.references import References
from support.runs import command, digests, inspected, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="stages are for Linux"),
]


def test_workers_in_stages_have_the_digest_of_one_piece_and_rows_in_the_trace(
    tmp_path: Path, references: References
) -> None:
    stages = ("--devices", "cpu+cpu", "--split", "embedding", "--workers", "2")
    files = ("--trace", str(tmp_path / "trace.json"), "--run-dir", str(tmp_path / "run"))
    ended = run(command("everything.py", options=(*stages, *files)))
    assert ended.code == 0, ended.said
    assert digests(tmp_path / "run") == references.on_a_tower("everything.py").digests
    assert inspected(tmp_path / "run")["devices"] == ["cpu+cpu"]
    # Each stage of each worker has a row in the trace, with all shards of its worker.
    written = traces.read(tmp_path / "trace.json")
    rows = {name for name in written.names.values() if "stage" in name}
    assert rows == {f"worker {n}: stage {stage}" for n in range(2) for stage in range(2)}
    spans = written.of("training", "backward")
    computed = {(span.step, span.shard) for span in spans}
    for stage in range(2):
        own = (s for s in spans if written.names[s.process, s.thread].endswith(f"stage {stage}"))
        assert {(span.step, span.shard) for span in own} == computed
