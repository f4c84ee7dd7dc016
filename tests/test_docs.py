"""The documents: the map of files, the reference, links, paths and the first script."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quorate
from quorate.__main__ import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
CALLS = {
    **{
        public: getattr(quorate, public)
        for public in quorate.__all__
        if public not in ("load_weights", "Shared")  # accepts any keywords
    },
    "fit": quorate.Trainer.fit,
    "updates": quorate.Trainer.updates,
}
PLACES = (ROOT, ROOT / "src" / "quorate", DOCS)  # bases of paths in documents


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_map_of_files_is_what_the_modules_say() -> None:
    command = [sys.executable, str(DOCS / "map_of_files.py"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_every_module_says_what_it_is() -> None:
    page = (DOCS / "maintainers" / "architecture.md").read_text()
    assert "|  |" not in page.partition("<!-- map")[2]


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    there = set(re.findall(r"auto\w+:: (quorate\.\w+)(?:\(\))?$", reference, re.MULTILINE))
    assert {f"quorate.{public}" for public in quorate.__all__} <= there
    errors = dict(inspect.getmembers(quorate.errors, inspect.isclass))
    named = set(re.findall(r"autoexception:: [\w.]+\.(\w+)", reference))
    assert named == {n for n, kind in errors.items() if issubclass(kind, quorate.QuorateError)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:|mailto:", target):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    for path in re.findall(r"`([\w./-]+/[\w-]+\.(?:py|md))`", without_code(page)):
        assert any((place / path).exists() for place in PLACES), path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keywords_that_are_shown_exist(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "messages.md"):  # the past, and mistakes
        return
    text = page.read_text()
    theirs = page.name == "coming-from.md"  # other projects have a Trainer and a fit too
    prefix = r"\bquorate\." if theirs else r"\b(?:quorate\.)?"
    for call in re.finditer(rf"{prefix}({'|'.join(CALLS)})\(", text):
        known = inspect.signature(CALLS[call[1]]).parameters
        assert keywords(text, call.end()) <= known.keys(), text[call.start() : call.end() + 80]


def keywords(text: str, start: int) -> set[str]:
    """Return the keywords of a call whose arguments begin here, without those of inner calls."""
    depth, end, own = 1, start, ""
    while depth and end < len(text):
        depth += (text[end] in "([{") - (text[end] in ")]}")
        own += text[end] if depth == 1 else ""
        end += 1
    return set(re.findall(r"(?:^|[\s,])(\w+) ?=(?!=)", re.sub(r"#.*|'[^']*'|\"[^\"]*\"", "", own)))


def test_the_page_of_run_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "command.md").read_text()
    assert main(["run", "--help"]) == 0
    flags = re.findall(r"^  --(?:\[no-\])?([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(flags) > 40
    measuring = {"profile", "profile-s", "record", "record-updates", "measure-model"}
    for name in set(flags) - measuring:  # those have a paragraph together
        assert f"| `--{name}" in page, name
