"""The tests themselves: a folder for each room, shared code in support, no leak unseen."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.modules import MODULES, imported, is_public, parsed, top_modules

import quorate

TESTS = Path(__file__).parent
ROOMS = {path.parent.name for path in Path(quorate.__file__).parent.glob("*/__init__.py")}
# Whole runs; programs beside the package; code shared by tests; scripts; digests; pytest's own.
BESIDE_ROOMS = {
    *("end_to_end", "examples", "support", "scripts", "strangers", "golden"),
    "accelerator",  # the simulated accelerator
    "fixtures",
    "__pycache__",
}


def named(path: Path) -> set[str]:
    """Return the modules of the package imported by a file, or named in a string."""
    found = set(imported(path))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = re.split(r"[^\w.]", node.value)[0]
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            found |= {name} - {""}
    return found


def test_each_room_has_its_folder() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - BESIDE_ROOMS
    assert folders == ROOMS


def test_a_test_imports_from_support_and_never_from_a_test() -> None:
    wrong = {
        (str(path.relative_to(TESTS)), name)
        for path in TESTS.rglob("*.py")
        for name in top_modules(path)
        if name.startswith("test_") or name in {".", "tests", "conftest"}
    }
    assert wrong == set()


def test_only_listed_tests_import_internal_modules() -> None:
    """All unlisted tests stay unchanged in a new design."""
    listed = {}
    for line in (TESTS / "white_box.txt").read_text().splitlines():
        path, _, reason = line.partition("#")
        listed[path.strip()] = reason.strip()
    assert list(listed) == sorted(listed)
    assert "" not in listed.values()
    found = {}
    for path in TESTS.rglob("*.py"):
        if internal := {name for name in named(path) if not is_public(name)}:
            found[str(path.relative_to(TESTS.parent))] = sorted(internal)
    assert {path: found[path] for path in found.keys() - listed.keys()} == {}
    assert listed.keys() - found.keys() == set()


def test_every_test_is_watched_for_leaks(request: pytest.FixtureRequest) -> None:
    unwatched = {
        item.nodeid
        for item in request.session.items
        if "nothing_is_left" not in getattr(item, "fixturenames", ())
    }
    assert unwatched == set()


CONFTEST = """
from pathlib import Path
from support.messages import Messages

def pytest_addoption(parser):
    parser.addoption("--update-messages", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(Messages(config, Path(__file__).parent))
"""
A_TEST = """
import pytest
from support.messages import expect_error, expect_message

class Error(Exception):
    name = "shards"

@pytest.mark.parametrize("got", [3, 4])
def test_{name}(got, tmp_path):
    with expect_error(Error, name="shards"):
        raise Error(f"{{tmp_path}}: got {{got}}, expected 2")
    expect_message("{text}")
"""
WRITTEN = """\
# Whole messages, by test. To write them anew: pytest --update-messages tests/room

deep/test_a.py::test_one[3]
    TMP: got 3, expected 2

deep/test_a.py::test_one[3] (2)
    read
"""


def pytest_in(folder: Path, *options: str) -> tuple[int, str]:
    """Return the exit code and the output of pytest, in a folder of tests."""
    (folder / "pytest.ini").touch()
    (folder / "conftest.py").write_text(CONFTEST)
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import pytest; "
    code += f"sys.exit(pytest.main({['-q', *options]}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_messages_are_written_compared_and_reported_as_stale(tmp_path: Path) -> None:
    def run(*options: str, name: str = "one", text: str = "read") -> tuple[int, str]:
        (room / "deep" / "test_a.py").write_text(A_TEST.format(name=name, text=text))
        return pytest_in(tmp_path, *options)

    room = tmp_path / "room"
    (room / "deep").mkdir(parents=True)
    written = room / "messages.txt"

    code, out = run()
    assert code == 1
    assert "+TMP: got 3, expected 2" in out
    assert run("--update-messages")[0] == 0
    assert written.read_text().startswith(WRITTEN)

    code, out = run(text="ready")
    assert code == 1
    assert "-read\n" in out
    assert "+ready\n" in out

    code, out = run("-n", "1", name="two")
    assert code == 1
    assert "room/messages.txt: deep/test_a.py::test_one[4] (2)" in out
    assert run("--update-messages", "-k", "3", name="two")[0] == 0
    assert [line for line in written.read_text().splitlines() if line.startswith("deep")] == [
        "deep/test_a.py::test_two[3]",
        "deep/test_a.py::test_two[3] (2)",
    ]
