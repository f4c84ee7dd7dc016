"""Kinds of mutants: each finds places in a source text, with the replacing text.

A kind is a function from a node of the syntax tree to the new text of the node, or ``None`` where
the kind does not apply. Statements to leave out become ``pass``.
"""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple


class Mutation(NamedTuple):
    """A change of a place in a source file."""

    kind: str
    line: int  # from 1
    start: int  # offsets in the text, in bytes of UTF-8
    end: int
    replacement: str

    def apply(self, text: str) -> str:
        """Return the changed text."""
        source = text.encode()
        return (source[: self.start] + self.replacement.encode() + source[self.end :]).decode()


COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SEEDING = ("seed", "manual_seed", "reseed", "set_state", "setstate", "set_rng_state")
WRITING = ("flush", "fsync", "synchronize", "close", "commit", "notify", "notify_all", "set")
WAITING = ("wait", "join", "wait_for", "wait_stream", "wait_event", "barrier", "record_stream")
COPYING = ("clone", "copy", "detach", "contiguous", "deepcopy")
ORDERED = (("left", "right"), ("first", "second"), ("before", "after"), ("ours", "theirs"))
SWAPPED: dict[type[ast.operator], str] = {
    ast.Sub: "-",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}


def _called(node: ast.AST) -> str:
    """Return the last name of the function that a statement calls, dropping its result."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ""
    return _last_name(node.value.func)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def comparison(node: ast.AST) -> str | None:
    """Flip a comparison, or move a bound by 1."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    new = COMPARED[type(node.ops[0])]
    return f"({ast.unparse(node.left)} {new} {ast.unparse(node.comparators[0])})"


def condition(node: ast.AST) -> str | None:
    """Take ``and`` for ``or``, and ``or`` for ``and``."""
    if not isinstance(node, ast.BoolOp):
        return None
    new = " or " if isinstance(node.op, ast.And) else " and "
    return f"({new.join(f'({ast.unparse(value)})' for value in node.values)})"


def lock(node: ast.AST) -> str | None:
    """Do without a lock, a turn or a condition held by a block."""
    if not isinstance(node, ast.withitem):
        return None
    held = node.context_expr
    name = _last_name(held.func if isinstance(held, ast.Call) else held)
    if not any(word in name.lower() for word in ("lock", "turn", "condition", "exclusive")):
        return None
    return "__import__('contextlib').nullcontext()"


def leave_out(called: tuple[str, ...], node: ast.AST) -> str | None:
    """Leave out a call of any of these functions."""
    return "pass" if _called(node) in called else None


def operands(node: ast.AST) -> str | None:
    """Swap left and right: of an operator, or of two arguments whose names give the order."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return None
        symbol = SWAPPED[type(node.op)]
        return f"(({ast.unparse(node.right)}) {symbol} ({ast.unparse(node.left)}))"
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = node.args
        if (_last_name(first), _last_name(second)) in ORDERED:
            called = ast.unparse(node.func)
            return f"{called}({ast.unparse(second)}, {ast.unparse(first)})"
    return None


def bound(node: ast.AST) -> str | None:
    """Move a bound of a slice, or the end of a range, by 1."""
    if isinstance(node, ast.Slice) and node.step is None:
        low = "" if node.lower is None else ast.unparse(node.lower)
        if node.upper is not None:
            return f"{low}:({ast.unparse(node.upper)}) - 1"
        return f"({low}) + 1:" if low else None
    if isinstance(node, ast.Call) and _last_name(node.func) == "range" and node.args:
        *others, last = map(ast.unparse, node.args[:2])
        rest = map(ast.unparse, node.args[2:])
        return f"range({', '.join([*others, f'({last}) - 1', *rest])})"
    return None


def copy(node: ast.AST) -> str | None:
    """Use a value itself instead of a copy."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr in COPYING:
        return ast.unparse(node.func.value) if not node.args else ast.unparse(node.args[0])
    return None


def refusal(node: ast.AST) -> str | None:
    """Do not raise an error."""
    return "pass" if isinstance(node, ast.Raise) and node.exc is not None else None


def update(node: ast.AST) -> str | None:
    """Leave out an assignment to an attribute or an item, or an addition."""
    if isinstance(node, ast.AugAssign):
        return "pass"
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return "pass" if isinstance(node.targets[0], ast.Attribute | ast.Subscript) else None
    return None


def call(node: ast.AST) -> str | None:
    """Leave out a call whose result is dropped, of a function that no other kind has."""
    name = _called(node)
    others = (*SEEDING, *WRITING, *WAITING)
    return "pass" if name and name not in others and not name.startswith("print") else None


KINDS: dict[str, Callable[[ast.AST], str | None]] = {
    **{
        kind.__name__: kind
        for kind in (comparison, condition, lock, operands, bound, copy, refusal, update, call)
    },
    "reseed": partial(leave_out, SEEDING),
    "flush": partial(leave_out, WRITING),
    "wait": partial(leave_out, WAITING),
}


def mutations(text: str) -> Iterator[Mutation]:
    """Yield all mutations of a source text, in the order of the text."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in _statements(ast.parse(text)):
        place = node.context_expr if isinstance(node, ast.withitem) else node
        if not hasattr(place, "end_col_offset"):
            continue
        for name, kind in KINDS.items():
            if (new := kind(node)) is None:
                continue
            start = lines[place.lineno - 1] + place.col_offset
            end = lines[place.end_lineno - 1] + place.end_col_offset
            yield Mutation(name, place.lineno, start, end, new)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree except for annotations, and blocks for type checkers."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.JoinedStr | ast.Assert):
                continue  # texts, without positions in Python 3.11, and statements that never fail
            yield node
            yield from _statements(node)
