"""The architecture: nine rooms, a single direction; public modules; pure modules."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from support.modules import MODULES as ALL_MODULES
from support.modules import imported, parsed, top_modules

import quorate

ROOT = Path(quorate.__file__).parent

# A room imports from itself and from rooms on lower lines.
ROOMS = (
    ("__main__",),
    ("commands", "testing", "callbacks"),
    ("__init__",),
    ("trainer",),
    ("training",),
    ("services",),
    ("engines",),
    ("data",),
    ("replica", "simulation"),
    ("coordination", "machine"),
    ("settings",),
    ("errors",),
)
RANK = {room: -line for line, rooms in enumerate(ROOMS) for room in rooms}
ROOT_FILES = {"__init__", "__main__", "trainer", "settings", "errors"}

MOST_PARAMETERS = 14  # of the front door

# The coordinator's logic, and its driver in virtual time, have none of these modules, not even by
# way of an import.
IMPURE = {"torch", "time", "threading", "socket", "multiprocessing", "asyncio", "subprocess"}
# Rooms without these modules: the rooms to import from.
PURE = {
    "coordination": {"coordination", "errors"},
    "simulation": {"simulation", "coordination", "settings", "errors"},
}


MODULES = {
    "__init__" if name == "quorate" else name.removeprefix("quorate."): path
    for name, path in ALL_MODULES.items()
}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(path: Path, *, at_run_time_only: bool = False) -> set[str]:
    """Return the package's modules imported by a file, by their names without "quorate."."""
    skipped = set(for_type_checkers(parsed(path))) if at_run_time_only else set()
    return {
        "__init__" if name == "quorate" else name.removeprefix("quorate.")
        for name in imported(path, skipped)
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def for_type_checkers(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of blocks for type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                yield from ast.walk(statement)


def test_rooms_and_their_direction() -> None:
    wrong = {
        (name, target)
        for name, path in MODULES.items()
        for target in imports(path)
        if room_of(target) != room_of(name) and RANK[room_of(target)] >= RANK[room_of(name)]
    }
    assert wrong == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    # Imports for type checkers alone close no circle.
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
        assert not top_modules(path) & IMPURE, name


# Attributes with one underscore of objects from scripts and torch.
OF_TORCH = {
    name
    for example in (
        *(torch.empty(0), torch.Generator(), torch.nn.Module(), torch.ops.aten.relu.default),
        torch.ones(1, requires_grad=True).exp().grad_fn,
        torch.optim.SGD([torch.empty(0)], lr=1.0),
        torch.utils.data.DataLoader([1]),
    )
    for name in dir(example)
    if is_private(name)
}


def private_parts_of_torch(path: Path) -> set[str]:
    """Return the used names of torch that begin with an underscore."""
    used = set()
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_torch = node.attr in OF_TORCH and text != f"self.{node.attr}"
            names = [f"torch.{node.attr}" if of_torch else text]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [f"torch.{a.value}" for a in node.args if isinstance(a, ast.Constant)]
            names = [name for name in names if name.removeprefix("torch.") in OF_TORCH]
        used |= {n for n in names if n.startswith("torch") and any(map(is_private, n.split(".")))}
    return used


def test_private_parts_of_torch_are_in_three_files() -> None:
    used = {name: private_parts_of_torch(path) for name, path in MODULES.items()}
    assert len(used.pop("replica.torch_internals")) > 10  # the base of promises
    assert used.pop("replica.kernels.onednn")  # faster, if torch has it
    assert used.pop("replica.quick.torch_calls")  # likewise
    assert {name: parts for name, parts in used.items() if parts} == {}


def test_the_environment_is_read_and_written_in_one_file() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert "os.putenv" not in text
        reads = "os.environ" in text or "getenv" in text
        assert name == "machine.environment" or not reads, name


# Parts of torch for NVIDIA's GPUs alone. All other code is written for any accelerator.
NAMES_CUDA = {
    "machine.device_names": "the type that TensorFlow calls gpu",
    "machine.devices": "the default devices, and why there are none",
    "machine.gpu_identity": "NVML",
    "services.device_use": "NVML",
    "replica.precision": "TF32",
    "replica.quick.torch_calls": "TF32",
    "replica.shared.switches": "TF32, attention",
    "replica.deterministic": "cuBLAS and cuDNN",
    "replica.cuda_graph": "graphs",
    "engines.ray.demand": "Ray's GPUs",
    "commands.doctor.ask_nvml": "NVML",
    "commands.doctor.ask_torch": "the build of torch, the identity of a GPU",
    "commands.doctor.examination": "the driver",
    "commands.doctor.hosts.meeting": "the build of torch",
    "commands.doctor.table": "the build of torch",
    "commands.doctor.torch_verdicts": "the build of torch",
    "commands.doctor.wanted": "the default devices",
}


def names_cuda(path: Path) -> bool:
    """Return whether code has an attribute, an argument or a device of the name "cuda"."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                if "cuda" in name.split("."):
                    return True
            case ast.Constant(value=str(text)) if re.match(r"cuda(:|$)", text):
                return True
    return False


def test_cuda_is_named_in_few_files() -> None:
    assert {name for name, path in MODULES.items() if names_cuda(path)} == NAMES_CUDA.keys()


def test_importing_starts_nothing() -> None:
    check = (
        "import threading, torch, warnings; warnings.simplefilter('error');"
        "generator = torch.random.default_generator;"
        "import quorate; quorate.Trainer; assert threading.active_count() == 1;"
        "assert torch.random.default_generator is generator"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
