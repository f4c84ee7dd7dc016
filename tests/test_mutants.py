"""The generator of mutants: the changes of each kind, and verdicts on a small package."""

import pytest
from support.mutants.kinds import KINDS, mutations

# kind -> a statement, and the changed statement
CHANGED = {
    "comparison": ("ok = a.b < c", "ok = (a.b <= c)"),
    "condition": ("ok = a and not b", "ok = ((a) or (not b))"),
    "lock": ("with self._lock:\n    x()", "with __import__('contextlib').nullcontext():\n    x()"),
    "reseed": ("generator.manual_seed(3)", "pass"),
    "operands": ("size = stop - start", "size = ((start) - (stop))"),
    "bound": ("part = rows[first:last]", "part = rows[first:(last) - 1]"),
    "flush": ("file.flush()", "pass"),
    "wait": ("event.wait(timeout=1)", "pass"),
    "copy": ("kept = values.clone()", "kept = values"),
    "refusal": ("raise ValueError('no')", "pass"),
    "update": ("self.count += 1", "pass"),
    "call": ("self.tell(1)", "pass"),
}
UNCHANGED = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    x.y = 1 < 2


def f(a: "1 < 2", b: list[int]) -> None:
    assert a < b, f"{a - b}"
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_changes_one_place(kind: str) -> None:
    before, after = CHANGED[kind]
    text = f"# naïve\n{before}\n"  # positions are counted in bytes
    found = {m.kind: m for m in mutations(text)}
    assert found[kind].apply(text) == f"# naïve\n{after}\n"
    assert found[kind].line == 2
    compile(found[kind].apply(text), "mutant", "exec")


def test_annotations_assertions_and_texts_are_left_alone() -> None:
    assert list(mutations(UNCHANGED)) == []
