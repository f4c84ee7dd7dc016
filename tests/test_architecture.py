"""The architecture: nine rooms, one direction; what is public; what is pure."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import torch

import quorate

ROOT = Path(quorate.__file__).parent

# A room imports from itself and from rooms on lines below its own.
ROOMS = (
    ("__main__",),
    ("commands", "testing", "callbacks"),
    ("__init__",),
    ("trainer",),
    ("training",),
    ("services",),
    ("transports",),
    ("data",),
    ("replica", "simulation"),
    ("coordination", "machine"),
    ("settings",),
    ("errors",),
)
RANK = {room: -line for line, rooms in enumerate(ROOMS) for room in rooms}
ROOT_FILES = {"__init__", "__main__", "trainer", "settings", "errors"}

MOST_PARAMETERS = 14  # of the front door

# The coordinator's logic, and what drives it in virtual time, has none of these, not
# even by way of something that it imports.
IMPURE = {"torch", "time", "threading", "socket", "multiprocessing", "asyncio", "subprocess"}
# Of rooms without them: the rooms that they import from.
PURE = {
    "coordination": {"coordination", "errors"},
    "simulation": {"simulation", "coordination", "settings", "errors"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(path: Path, *, at_run_time_only: bool = False) -> set[str]:
    """The modules of the package that a file imports, by their names without "quorate."."""
    found = set()
    tree = ast.parse(path.read_text())
    if at_run_time_only:
        tree = WithoutTypeChecking().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full.removeprefix("quorate.") in MODULES else node.module)
    ours = {name.removeprefix("quorate.") for name in found if name.startswith("quorate.")}
    return (ours & MODULES.keys()) | ({"__init__"} if "quorate" in found else set())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        name = node.test.id if isinstance(node.test, ast.Name) else ""
        return None if name == "TYPE_CHECKING" else self.generic_visit(node)


def test_rooms_and_their_direction() -> None:
    wrong = {
        (name, target)
        for name, path in MODULES.items()
        for target in imports(path)
        if room_of(target) != room_of(name) and RANK[room_of(target)] >= RANK[room_of(name)]
    }
    assert wrong == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    # What is imported for type checkers alone closes no circle.
    graph = {
        name: imports(path, at_run_time_only=True) - {name, "__init__"}
        for name, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()


def test_a_few_files_at_the_root() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == ROOT_FILES


def test_the_front_door() -> None:
    parameters = inspect.signature(quorate.Trainer.__init__).parameters.values()
    named = [p for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    assert len(named) <= MOST_PARAMETERS


def test_coordination_and_simulation_are_pure() -> None:
    for name, path in MODULES.items():
        if room_of(name) not in PURE:
            continue
        assert {room_of(target) for target in imports(path)} <= PURE[room_of(name)], name
        roots = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                roots.add(node.module.partition(".")[0])
        assert not roots & IMPURE, name


# Attributes with one underscore of what scripts and torch hand to us.
OF_TORCH = {
    name
    for example in (
        *(torch.empty(0), torch.Generator(), torch.nn.Module(), torch.ops.aten.relu.default),
        torch.ones(1, requires_grad=True).exp().grad_fn,
        torch.optim.SGD([torch.empty(0)], lr=1.0),
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.empty(0)], lr=1.0), 1),
        torch.utils.data.DataLoader([1]),
    )
    for name in dir(example)
    if is_private(name)
}


def private_parts_of_torch(path: Path) -> set[str]:
    """What a file uses of torch that begins with an underscore."""
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_torch = node.attr in OF_TORCH and text != f"self.{node.attr}"
            names = [f"torch of some kind: {text}"] if of_torch else [text]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [f"torch.{v}" for v in values if v in OF_TORCH]
        for name in names:
            first, *rest = name.split(".")
            if first.startswith("torch") and any(map(is_private, rest)):
                used.add(name)
    return used


def test_private_parts_of_torch_are_in_three_files() -> None:
    used = {name: private_parts_of_torch(path) for name, path in MODULES.items()}
    assert len(used.pop("replica.torch_internals")) > 10  # what promises are made of
    assert used.pop("replica.kernels.onednn")  # what is faster, where torch has it
    assert used.pop("replica.quick.torch_calls")  # likewise
    assert {name: parts for name, parts in used.items() if parts} == {}


def test_the_environment_is_read_and_written_in_one_file() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert "os.putenv" not in text
        reads = "os.environ" in text or "getenv" in text
        assert name == "machine.environment" or not reads, name


def test_importing_starts_nothing() -> None:
    check = (
        "import threading, torch, warnings; warnings.simplefilter('error');"
        "generator = torch.random.default_generator;"
        "import quorate; quorate.Trainer; assert threading.active_count() == 1;"
        "assert torch.random.default_generator is generator"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_command_says_what_it_can() -> None:
    command = [sys.executable, "-m", "quorate", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "\n  inspect  show the state and the checkpoints of a run\n" in ended.stdout
