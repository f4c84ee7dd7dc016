"""Whole sentences of errors: each room of tests keeps its sentences in a file ``messages.txt``.

A test states the type of an error and the parts that matter to the test. The sentence stands in the
file, under the name of the test, so a reworded message is a single line of a diff::

    with expect_error(SettingError, name="shards", got=3):
        trainer(shards=3)

``pytest --update-messages tests/data`` writes the sentences as the tests of a room see them now.
"""

import difflib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)

FILE = "messages.txt"
HEAD = "# Whole messages, by test. To write them anew: pytest --update-messages tests/ROOM\n"
INDENT = "    "
_ABSENT = "no such part"
# Differences between machines and runs, and their substitutes.
_VARIABLE = [
    (
        re.compile(
            re.escape(tempfile.gettempdir())
            + r"/(pytest-of-[^/]+/[^/]+(/popen-gw\d+)?|quorate-test-\w+)"
        ),
        "TMP",
    ),
    (re.compile(re.escape(version("torch")) + r"(?![\w.])"), "TORCH_VERSION"),
    (re.compile(r"(?<!step-)\b[0-9a-f]{12,}\b"), "DIGEST"),
    (re.compile(r"\b0x[0-9a-f]+\b"), "ADDRESS"),
    (re.compile(r"\b(process|pid) \d+\b"), r"\1 PID"),
    (re.compile(r"(\.py(?::|, line )|\bline )\d+\b"), r"\1N"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"), "DATE"),
]

_test: "_Test | None" = None  # the running test


@contextmanager
def expect_error(
    kind: type[E], *, hide: str = "", **parts: object
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an exception with some parts, and with the sentence of the room's file.

    Args:
        hide: A pattern of another library's words; ``...`` stands for the words in the file.
        parts: Attributes of the exception: name, got, expected, fix, ...
    """
    with pytest.raises(kind) as caught:
        yield caught
    found = {part: getattr(caught.value, part, _ABSENT) for part in parts}
    assert found == parts, str(caught.value)
    expect_message(re.sub(hide, "...", str(caught.value)) if hide else caught.value)


def expect_message(message: object) -> None:
    """Compare a text with the room's file; the n-th call of a test with the test's n-th entry."""
    assert _test is not None, "only a test that runs has messages"
    _test.compare(str(message))


class Messages:
    """The plugin of pytest for reading and writing the files.

    Args:
        folder: The folder with a folder per room.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._updates = bool(config.getoption("--update-messages"))
        if self._updates and config.getoption("numprocesses", None):
            raise pytest.UsageError("--update-messages: got -n, expected one process; leave -n out")
        self._stored: dict[Path, dict[str, str]] = {}
        self._seen: dict[Path, dict[str, str]] = {}
        self._stale: set[str] = set()

    @pytest.hookimpl(tryfirst=True)  # before -k and -m leave tests out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Find entries without a test, in the files whose tests were all collected."""
        if any("::" in argument for argument in self._config.args) or self._config.getoption(
            "lf", None
        ):
            return
        names = {self._name(item) for item in items}
        files = {(path, name.partition("::")[0]) for path, name in names}
        for path in {path for path, _ in names}:
            for key in [*self._read(path)]:
                file = key.partition("::")[0]
                was_read = (path, file) in files or not (path.parent / file).exists()
                if not was_read or (path, _without_number(key)) in names:
                    continue
                if self._updates:
                    del self._read(path)[key]
                    self._seen.setdefault(path, {})
                else:
                    self._stale.add(f"{path.parent.name}/{FILE}: {key}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Know the test whose messages are compared; refuse entries that the test did not see."""
        global _test
        path, name = self._name(item)
        temporary = getattr(item, "funcargs", {}).get("tmp_path")
        _test = _Test(name, self._read(path), temporary, self._updates)
        try:
            yield
            unseen = _test.unseen()
            if self._updates:
                for key in unseen:
                    del self._read(path)[key]
                self._seen.setdefault(path, {}).update(_test.seen)
            elif unseen:
                pytest.fail(f"{path}: this test does not see {', '.join(unseen)}", pytrace=False)
        finally:
            _test = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files, or have stale entries fail the session."""
        if self._updates:
            for path, seen in self._seen.items():
                _write(path, {**self._read(path), **seen})
        elif hasattr(self._config, "workeroutput"):  # of xdist
            self._config.workeroutput["stale_messages"] = sorted(self._stale)
        elif self._stale and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the stale entries found by a worker of xdist."""
        self._stale.update(getattr(node, "workeroutput", {}).get("stale_messages", ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report stale entries."""
        if self._stale and not self._updates:
            terminalreporter.section("messages without a test; run pytest --update-messages")
            for entry in sorted(self._stale):
                terminalreporter.line(entry)

    def _name(self, item: pytest.Item) -> tuple[Path, str]:
        """Return the file with the messages of a test, and the test's name there."""
        room = item.path.parent
        if self._folder in room.parents:
            room = self._folder / room.relative_to(self._folder).parts[0]
        _, *names = item.nodeid.split("::")
        return room / FILE, "::".join([item.path.relative_to(room).as_posix(), *names])

    def _read(self, path: Path) -> dict[str, str]:
        if path not in self._stored:
            self._stored[path] = parse(path.read_text()) if path.exists() else {}
        return self._stored[path]


@dataclass
class _Test:
    """A running test, and the messages seen so far."""

    name: str
    stored: dict[str, str]  # all entries of the room's file
    temporary: Path | None  # the folder of the fixture ``tmp_path``
    is_update: bool
    seen: dict[str, str] = field(default_factory=dict)

    def compare(self, message: str) -> None:
        count = len(self.seen) + 1
        key = self.name if count == 1 else f"{self.name} ({count})"
        self.seen[key] = found = invariable(message, self.temporary)
        expected = self.stored.get(key)
        if found == expected or self.is_update:
            return
        lines = difflib.unified_diff(
            (expected or "").splitlines(), found.splitlines(), FILE, key, lineterm="", n=0
        )
        what = "a new message" if expected is None else "another message"
        advice = f"{what}; if it reads well, run pytest --update-messages"
        raise pytest.fail.Exception("\n".join([advice, *lines]), pytrace=False) from None

    def unseen(self) -> list[str]:
        ours = (key for key in self.stored if _without_number(key) == self.name)
        return [key for key in ours if key not in self.seen]


def invariable(message: str, temporary: Path | None = None) -> str:
    """Return a message without the differences between machines and runs."""
    for folder, name in ((temporary, "TMP"), (Path(__file__).parents[2], "REPOSITORY")):
        if folder is not None:
            message = message.replace(str(folder), name)
    for pattern, name in _VARIABLE:
        message = pattern.sub(name, message)
    return "\n".join(message.splitlines())


def parse(text: str) -> dict[str, str]:
    """Return the messages of a file by test."""
    found: dict[str, list[str]] = {}
    key = ""
    for line in text.splitlines():
        if line.startswith(INDENT):
            found[key].append(line.removeprefix(INDENT))
        elif line and not line.startswith("#"):
            key = line
            found[key] = []
    return {key: "\n".join(lines) for key, lines in found.items()}


def _write(path: Path, messages: dict[str, str]) -> None:
    blocks = [HEAD.replace("ROOM", path.parent.name)]
    for key in sorted(messages):
        lines = [INDENT + line for line in messages[key].splitlines() or [""]]
        blocks.append("\n".join([key, *lines, ""]))
    if messages:
        path.write_text("\n".join(blocks))
    else:
        path.unlink(missing_ok=True)


def _without_number(key: str) -> str:
    return re.sub(r" \(\d+\)$", "", key)
