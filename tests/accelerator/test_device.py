"""Tests in separate processes: of the simulated accelerator alone, and of mended faults.

A process keeps the devices for good, and most tests must have none. ``on_device/`` shows the
accelerator; the accelerator also runs the tests that need a GPU. With each patch of ``faults/``, on
a copy of the source, the test named by the patch fails. The head of a patch describes the fault,
and names the reporting test (a path from here) and the words of the report.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from support.accelerator import build, environment
from support.runs import Ended
from support.warm import Warm

import quorate

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("on_device/*.py")), HERE.parent / "end_to_end" / "test_gpu.py"]
LIMIT_S = 600  # on a busy machine
DELAYS = (0.5, 300, 0)  # see ``environment``
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.lacking() is not None, reason=build.lacking() or ""),
]


@cache
def warm(*, has_devices: bool) -> Warm:
    """Return a process with torch imported, and nothing of quorate; its forks run pytest."""
    build.library()
    return Warm(environment(DELAYS) if has_devices else None, ("torch._dynamo", "pytest"))


def run_alone(test: str, source: Path | None = None) -> Ended:
    """Run a test to its end, with quorate from another source folder if given. Blocks."""
    has_devices = "on_device" in test or "test_gpu" in test
    env = environment(DELAYS) if has_devices else {**os.environ}
    if source is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), env.get("PYTHONPATH")]))
    words = ["-x", test, "-p", "no:cacheprovider"]
    return Ended(*warm(has_devices=has_devices).run(words, env, LIMIT_S, "pytest"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_device(file: Path) -> None:
    ended = run_alone(str(file))
    assert ended.code == 0, ended.said


@pytest.mark.parametrize("patch", sorted(HERE.glob("faults/*.patch")), ids=lambda path: path.stem)
def test_a_fault_is_reported(patch: Path, tmp_path: Path) -> None:
    lines = patch.read_text().partition("diff --git")[0].splitlines()
    head = dict(line.split(": ", 1) for line in lines if line.startswith(("test: ", "says: ")))
    shutil.copytree(Path(quorate.__file__).parent, tmp_path / "src/quorate")
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    ended = run_alone(str(HERE / head["test"]), tmp_path / "src")
    assert ended.code == 1, ended.said
    assert head["says"] in ended.out, ended.out
