"""Rename internal modules in a copy of the tree, run tests there, and say which files break.

    python tests/rename_modules.py --count 10 --seed 1 -- -n 2 -m "not slow"

What breaks must be listed in tests/white_box.txt, or be a rule about modules: all other tests know
the public interface alone.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.modules import MODULES, PACKAGE, is_public
from support.mutants.trees import copy, environment

TREE = Path(__file__).parents[1]
WHITE_BOX = TREE / "tests" / "white_box.txt"
# Rules about modules by their names, which change with these.
RULES = {"tests/test_architecture.py", "tests/test_the_tests.py"}


def candidates() -> list[str]:
    """Return the modules that may be renamed: internal ones, and no folders."""
    return [name for name, path in MODULES.items() if path.stem[0] != "_" and not is_public(name)]


def new_name(module: str) -> str:
    """Return what a module is called afterwards."""
    folder, _, name = module.rpartition(".")
    return f"{folder}.renamed_{name}"


def rewrite(path: Path, renamed: set[str]) -> None:
    """Write the new names into a source file: in imports, and in strings that are such names."""
    text = path.read_text()
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    changes: list[tuple[int, int, int, str]] = []  # line, start, end, new text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in renamed:
                    new = f"renamed_{alias.name} as {alias.asname or alias.name}"
                    assert alias.end_col_offset is not None
                    changes.append((alias.lineno, alias.col_offset, alias.end_col_offset, new))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for old in (node.value, f"quorate.{node.value}"):
                if old in renamed:
                    new = repr(new_name(old)[len(old) - len(node.value) :])
                    assert node.end_col_offset is not None
                    changes.append((node.lineno, node.col_offset, node.end_col_offset, new))
    for line, start, end, new in sorted(changes, reverse=True):
        old_line = lines[line - 1]
        lines[line - 1] = old_line[:start] + new.encode() + old_line[end:]
    text = b"".join(lines).decode()
    for module in renamed:
        # "from quorate.a.b import c" and "import quorate.a.b"
        text = re.sub(rf"\b((?:from|import) ){re.escape(module)}\b", rf"\1{new_name(module)}", text)
    path.write_text(text)


def rename(tree: Path, modules: set[str]) -> None:
    """Rename modules in a tree: their files, who imports them, and the docs that list files."""
    for module in modules:
        old = tree / "src" / MODULES[module].relative_to(PACKAGE.parent)
        new = old.with_name(f"renamed_{old.name}")
        old.rename(new)
        for page in (tree / "docs").rglob("*.md"):
            text = page.read_text().replace(module, new_name(module))
            page.write_text(
                text.replace(f"{old.parent.name}/{old.name}", f"{old.parent.name}/{new.name}")
            )
    for path in (tree / "src").rglob("*.py"):
        rewrite(path, modules)
    maps = [sys.executable, "docs/map_of_files.py"]
    subprocess.run(maps, cwd=tree, env=environment(tree), check=True)


def main() -> int:
    """Rename, run the tests, and return 1 if a file breaks that is not listed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10, help="modules to rename")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("selection", nargs="*", help="arguments of pytest, after --")
    asked = parser.parse_args()
    modules = set(random.Random(asked.seed).sample(candidates(), asked.count))
    print("renamed:", *sorted(modules), sep="\n  ", flush=True)
    listed = RULES | {line.split()[0] for line in WHITE_BOX.read_text().splitlines()}
    with tempfile.TemporaryDirectory(prefix="quorate-renamed-") as folder:
        tree = Path(folder, "tree")
        copy(TREE, tree)
        rename(tree, modules)
        Path(folder).chmod(0o755)  # some tests are another user
        options = ["-q", "--no-header", "--tb=short", "-rfE", "--continue-on-collection-errors"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *asked.selection],
            cwd=tree,
            env=environment(tree),
            capture_output=True,
            text=True,
        )
    ids = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    broken = {name.split("::")[0] for name in ids}
    for path in sorted(broken):
        print("white box:" if path in listed else "UNEXPECTED:", path)
    if broken - listed:
        print(done.stdout)
    return 1 if broken - listed else 0


if __name__ == "__main__":
    sys.exit(main())
