"""Snippets of README and docs/: all Python snippets run, and every shown command exists."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from support.snippets import names, snippets

from quorate.commands.main import commands

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("README*.md")])
}
# Pages with separate tests of their snippets: the tests.
ELSEWHERE = {"docs/messages.md": "docs/mistakes.py, tests/commands/test_mistakes.py"}
SLOW = {
    *("README.md", "README.zh.md", "docs/start.md", "docs/start.zh.md"),
    *("docs/checkpoints.md", "docs/data.md"),
    *("docs/several-models.md", "docs/metrics.md"),
    *("docs/from-tensorflow-1.md", "docs/from-tensorflow-1.zh.md"),
    "docs/maintainers/writing-an-engine.md",
}
RUN = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, page in PAGES.items()
    if name not in ELSEWHERE and any(s.language == "python" for s in snippets(page))
]

# The package's command at the beginning of a line, behind a prompt, or in backticks.
COMMAND = re.compile(r"^(?:\$ )?(quorate [a-z-]+ .*)$", re.MULTILINE)
IN_TEXT = re.compile(r"`(quorate (?:run|inspect|verify|bench|plan|doctor|convert)\b[^`]*)`")


@pytest.mark.parametrize("name", RUN)
def test_the_snippets_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.backends.mkldnn.enabled", True)  # restored: scripts may set the flag
    namespace = names()
    missing: list[str] = []
    for snippet in snippets(PAGES[name]):
        if snippet.language != "python" or snippet.not_run:
            continue
        if lacks := [module for module in snippet.needs if find_spec(module) is None]:
            missing += lacks
            continue
        exec(compile(snippet.before, f"{name}, before line {snippet.line}", "exec"), namespace)
        text = "\n" * snippet.line + snippet.text  # for the page's lines in a traceback
        exec(compile(text, str(PAGES[name]), "exec"), namespace)
    if missing:
        pytest.skip(f"all else ran; not installed: {', '.join(missing)}")


def test_what_is_not_run_says_why() -> None:
    for name, page in PAGES.items():
        for snippet in snippets(page):
            assert not snippet.not_run or len(snippet.not_run) > 10, (name, snippet.line)
        # A misspelt comment, or a comment without a fence below, would be passed over.
        told = len(re.findall(r"<!-- ?(?:not run|before|needs):", page.read_text()))
        found = [(s.not_run, s.before, " ".join(s.needs)) for s in snippets(page)]
        assert told == sum(bool(each) for about in found for each in about), name


def shown(name: str) -> list[str]:
    """Return the command lines of a page."""
    text = PAGES[name].read_text()
    found: list[str] = []
    for snippet in snippets(PAGES[name]):
        if snippet.language in ("", "text", "bash") and not snippet.not_run:
            found += COMMAND.findall(re.sub(r"\\\n\s*", "", snippet.text))
    in_text = IN_TEXT.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    # In a sentence the script may be left out.
    return found + [
        line if re.match("quorate (inspect|plan|doctor|convert)", line) else f"{line} train.py"
        for line in in_text
    ]


@pytest.mark.parametrize("name", [n for n in PAGES if n not in ELSEWHERE and shown(n)])
def test_the_commands_of_a_page_are_read(name: str) -> None:
    for line in shown(name):
        # Up to the end of the command: an explanation behind spaces, a comment, the shell's words.
        ours = re.split(r"\s{2,}|\s#|\s[&|;>]", line.replace(" ...", ""))[0]
        words = shlex.split(ours)[1:]
        if len(words) == 1:
            assert words[0] in commands.list_commands(click.Context(commands)), line
            continue
        try:
            read: object = commands.main(words, "quorate", standalone_mode=False)
        except click.ClickException as error:
            pytest.fail(f"{line}: {error.format_message()}")
        assert callable(read) or read in (None, 0), line
