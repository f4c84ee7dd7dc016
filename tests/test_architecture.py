"""The architecture: what is public, who imports whom, what is pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import quorate

ROOT = Path(quorate.__file__).parent
# From the bottom to the top. A module imports only from rows below its own.
LAYERS = [
    ["errors", "keys", "digest", "report", "memory_format", "stop", "pace", "retention", "data"],
    ["structure"],
    ["lifeline", "restarts", "wire", "fingerprint", "tally", "protocol", "worker_status", "totals"],
    ["visible_devices", "cpu_time", "control_group", "descriptors", "loader_memory"],
    ["physical", "doctor", "doctor.facts", "doctor.ask_nvml", "doctor.ask_torch"],
    ["doctor.ask", "doctor.host", "doctor.network"],
    ["data.idx", "data.images", "data.sources", "evaluations", "shard_time", "services"],
    ["measured"],
    ["data.fetch", "data.sources.unpack", "data.sources.command", "services.device_use"],
    ["services.event_file", "supervisor"],
    ["settings", "shared_memory", "plan", "tree", "rules", "streams", "loss", "raised"],
    [
        "call_place",
        "signature",
        "memory_fraction",
        "out_of_memory",
        "precision",
        "notes",
        "compiled",
        "deterministic",
    ],
    ["coordinator", "flat", "devices", "straggler", "worker_table", "script", "augment"],
    ["doctor.verdicts", "computing", "soft_placement", "placement_log"],
    ["shard_graph", "transfer"],
    ["doctor.table", "placement"],
    ["data.sources.https", "data.sources.debian_package", "data.sources.npm_package"],
    ["data.sources.python_package"],
    ["data.labelled_images", "data.tfrecord.framing"],
    ["data.tfrecord.index", "data.tfrecord.example", "data.tfrecord.writer"],
    ["data.tfrecord.dataset"],
    ["data.tfrecord", "data.tfrecord.images"],
    ["data.fashion_mnist", "progress", "services.summary_writer"],
    ["shard_sum", "spread", "opening", "engines", "services.summaries", "services.worker_table"],
    ["replica", "feed", "finite"],
    ["doctor.limits"],
    ["doctor.examination"],
    ["snapshots"],
    ["job", "optimizer"],
    ["verify", "verify.values", "verify.records"],
    ["verify.calls", "verify.differences", "verify.module_trace"],
    ["verify.operator_trace", "verify.words"],
    ["verify.twice", "verify.verdict"],
    ["verify.recorded_training"],
    ["blame", "transports"],
    ["transports.arena", "transports.around"],
    ["transports.towers", "transports.worker", "drive", "update", "transports.processes_channel"],
    ["transports.nursery", "evaluate"],
    ["transports.birth"],
    ["transports.life"],
    ["transports.processes"],
    ["state"],
    ["checkpoint", "probe", "updates"],
    ["resume", "weights", "services.checkpoints", "profile", "verify.recorder"],
    ["callbacks"],
    ["fit"],
    ["trainer"],
    ["cli.after_script", "cli.child_run"],
    ["bench", "bench.contenders", "bench.split"],
    ["bench.runs", "bench.verdict"],
    ["bench.results"],
    ["bench.plot", "bench.table"],
    ["cli.bench", "cli.convert", "cli.doctor", "cli.run", "cli.inspect", "cli.verify"],
    ["cli"],
    ["__main__"],
]
PURE = [
    *("coordinator", "protocol", "tally", "restarts", "rules", "plan", "tree", "keys", "errors"),
    *("evaluations", "pace", "retention", "straggler", "measured"),
    *("bench.split", "bench.verdict", "bench.results", "bench.table"),
    *("visible_devices", "doctor.facts", "doctor.verdicts", "doctor.table"),
    *("verify.records", "verify.calls", "verify.differences", "verify.words", "verify.verdict"),
]
IMPURE = {"torch", "socket", "threading", "time", "multiprocessing", "asyncio"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = {name_of(p): p for p in ROOT.rglob("*.py") if name_of(p) != "__init__"}


def test_what_is_public() -> None:
    assert quorate.__all__ == ["Callback", "QuorateError", "Report", "Trainer", "UserError"]
    assert all(hasattr(quorate, name) for name in quorate.__all__)


def test_every_module_has_its_place() -> None:
    placed = [name for layer in LAYERS for name in layer]
    assert sorted(placed) == sorted(MODULES)


def test_imports_go_one_way() -> None:
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    for name, path in MODULES.items():
        for target in imports(path):
            other = target.removeprefix("quorate.")
            if not target.startswith("quorate.") or other not in rank or other == name:
                continue
            assert rank[other] < rank[name], f"{name} imports {other}"


def test_the_pure_modules_are_pure() -> None:
    for name in PURE:
        roots = {target.partition(".")[0] for target in imports(MODULES[name])}
        assert not roots & IMPURE, name


def test_the_environment_is_read_in_one_file_and_never_written() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert "os.putenv" not in text
        assert name == "settings" or ("os.environ" not in text and "getenv" not in text), name


def test_importing_starts_nothing() -> None:
    check = (
        "import threading, torch, warnings; warnings.simplefilter('error');"
        "generator = torch.random.default_generator;"
        "import quorate; assert threading.active_count() == 1;"
        "assert torch.random.default_generator is generator"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_command_says_what_it_can() -> None:
    command = [sys.executable, "-m", "quorate", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "run | inspect" in ended.stdout
