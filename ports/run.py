"""Ports: scripts of many kinds before quorate and with it, trained, compared and counted.

    python ports/run.py [--only NAME ...] [--json FILE] [--markdown FILE]

Each port is a file with a plain loop, the same with Accelerate, and the same with quorate, as
somebody would write them who has the first and wants the last; data is tiny and made on the spot.
Each is trained by the plain loop, by Accelerate on one process, and by quorate on one tower (a
thread), two towers and two worker processes. Digests have to be equal, and parameters within 1e-5
of those of the plain loop, unless the first lines of the file say ``Not compared:`` and why; a
port that says ``Refused:`` has to end with one line of a user's mistake, and one that says
``Processes alone:`` with one on towers. Exit code 1 if one of these is not so.

Changed lines are those of a diff of the two scripts (the loop's function and what all three
share), without indentation, blank lines, comments and docstrings.

The packages are those of ``ports/requirements.txt``, in an environment that this command makes, in
``ports/.environment`` or where --environment says. Results are kept in --json: a run with --only
puts its own in the place of older ones, and --markdown shows all.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import tokenize
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT_S = 600.0  # that a run on processes may take
CLOSE = 1e-5  # to the plain loop's parameters
# Imported by all, or a part of another name in the list.
NOT_SAID = {"torch", "quorate", "accelerate", "numpy", "tokenizers", *sys.stdlib_module_names}
WORKERS = ("1 tower", "2 towers", "1 process", "2 processes")
HARDLY = 100 * CLOSE  # moved: then being close says nothing
# Beside a torch for CPUs, the operators of the registry's torchvision do not load, and its import
# fails for want of a declaration. Packages import it that use none of them.
DECLARED = """

if not _has_ops():  # by ports/run.py: declared, without a kernel
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


class Port(NamedTuple):
    """A port, as its file describes it."""

    name: str
    path: Path
    title: str
    remark: str
    is_compared: bool
    is_refused: bool
    needs_processes: bool
    libraries: list[str]
    plain: list[str]  # lines of code
    ported: list[str]
    accelerated: list[str] | None


def code(text: str) -> list[str]:
    """Return the lines of code of a text, without indentation, comments and docstrings."""
    without = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        ):
            said = node.body[0]
            without |= set(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines = enumerate(text.splitlines(), 1)
    kept = [line[: comments.get(number)].strip() for number, line in lines if number not in without]
    return [line for line in kept if line]


def scripts(text: str) -> dict[str, list[str]]:
    """Return the scripts that a port is made of, by the names of their functions."""
    lines, tree = text.splitlines(), ast.parse(text)
    parts: dict[str, set[int]] = {}
    for node in tree.body:
        numbers = set(range(node.lineno - 1, node.end_lineno or node.lineno))
        if isinstance(node, ast.FunctionDef) and node.name in ("plain", "accelerated", "ported"):
            parts[node.name] = numbers
        elif isinstance(node, ast.If):
            parts["main"] = numbers
        elif isinstance(node, ast.Import) and node.names[0].name == "quorate":
            parts["import"] = numbers
    found = {}
    for name in parts.keys() - {"main", "import"}:
        own = {name, "import"} if name == "ported" else {name}
        others = parts.keys() - own
        left_out = set().union(*(parts[part] for part in others))
        kept = "\n".join("" if number in left_out else line for number, line in enumerate(lines))
        found[name] = [line for line in code(kept) if line != f"def {name}() -> nn.Module:"]
    return found


def port(path: Path) -> Port:
    """Return a port as its file describes it."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    title, _, remark = (ast.get_docstring(tree) or "").partition("\n\n")
    imported = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.partition(".")[0] for name in names}
    found = scripts(text)
    return Port(
        f"{path.parent.name}/{path.stem}",
        path,
        " ".join(title.split()).rstrip("."),
        " ".join(remark.split()),
        not remark.startswith("Not compared:"),
        remark.startswith("Refused:"),
        remark.startswith("Processes alone:"),
        sorted(imported - NOT_SAID),
        found["plain"],
        found["ported"],
        found.get("accelerated"),
    )


def changed(before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """Return how many lines a diff adds, and how many it takes away."""
    diff = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    blocks = [block for block in diff if block[0] != "equal"]
    return sum(b[4] - b[3] for b in blocks), sum(b[2] - b[1] for b in blocks)


def environment(folder: Path) -> Path:
    """Return the interpreter that has the requirements; its environment is made if need be."""
    requirements = HERE / "requirements.txt"
    python, stamp = folder / "bin" / "python", folder / "installed"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"making {folder}", file=sys.stderr, flush=True)
        venv.create(folder, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, "-r", str(requirements), "-e", str(ROOT)], check=True)
        works = subprocess.run([str(python), "-c", "import torchvision"], capture_output=True)
        if works.returncode != 0:
            find = "import importlib.util; print(importlib.util.find_spec('torchvision').origin)"
            origin = subprocess.run([str(python), "-c", find], capture_output=True, text=True)
            with Path(origin.stdout.strip()).with_name("extension.py").open("a") as extension:
                extension.write(DECLARED)
        stamp.write_text(digest)
    return python


def surroundings() -> dict[str, str]:
    """Return the environment of a run: this tree's quorate, no network, no telemetry."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHVISION_WARN_WHEN_EXTENSION_LOADING_FAILS": "",
    }


def in_one_process(python: Path, ports: Sequence[Port], log: Path) -> Iterator[dict[str, Any]]:
    """Yield what came of each port's plain loop, of Accelerate, and of one tower and two.

    One process trains them all, as imports take longer than trainings. If it dies, the next one
    goes on behind the port that it died of.
    """
    left = list(ports)
    while left:
        with tempfile.TemporaryDirectory() as folder, log.open("a") as words:
            out = Path(folder) / "out"
            command = [str(python), str(HERE / "trained.py"), "--all", str(out)]
            command += [str(one.path) for one in left]
            run = subprocess.run(
                command, stdout=words, stderr=words, env=surroundings(), check=False
            )
            lines = out.read_text().splitlines() if out.exists() else []
        yield from map(json.loads, lines)
        left = left[len(lines) :]
        if left:
            yield {"port": left[0].name, "error": f"the process ended with {run.returncode}"}
            left = left[1:]


def on_processes(python: Path, one: Port, workers: int, log: Path) -> dict[str, Any]:
    """Return what came of a port on so many worker processes: its digest, or an error."""
    command = [str(python), "-m", "quorate", "run", "--devices", "cpu", "--workers", str(workers)]
    command += ["--engine", "processes", str(HERE / "trained.py"), str(one.path)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=surroundings(),
                cwd=folder,
                check=False,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"on {workers} processes it took over {LIMIT_S:.0f} s"}
    with log.open("a") as words:
        print(f"== {one.name} on {workers} processes\n{run.stdout}\n{run.stderr}", file=words)
    results = [line for line in run.stdout.splitlines() if line.startswith('{"digest": ')]
    if run.returncode != 0 or not results:
        lines = (run.stdout + run.stderr).strip().splitlines() or ["it said nothing"]
        return {"error": f"on {workers} processes, exit code {run.returncode}: {lines[-1]}"}
    found: dict[str, Any] = json.loads(results[-1])
    return found


def with_processes(python: Path, one: Port, found: dict[str, Any], log: Path) -> dict[str, Any]:
    """Return what came of a port, with its digests on worker processes."""
    counts = [1, 2] if one.needs_processes and "refused" in found else [2]
    digests = dict(found.get("digests", {}))
    away = [found["distance"]] if "distance" in found else []
    for workers in counts:
        answer = on_processes(python, one, workers, log)
        if "error" in answer:
            return {**found, **answer}
        digests[f"{workers} process{'es' * (workers > 1)}"] = answer["digest"]
        away.append(answer["distance"])
    return {**found, "digests": digests, "distance": max(away)}


def fault(one: Port, found: dict[str, Any]) -> str | None:
    """Return what is not as it should be, or None."""
    if "error" in found:
        return f"fails: {found['error']}"
    if (one.is_refused or one.needs_processes) != ("refused" in found):
        return (
            f"is refused: {found['refused']}" if "refused" in found else "is not refused any more"
        )
    if one.is_refused:
        return None
    digests = found.get("digests", {})
    if len(digests) < 2:
        return "was trained on one number of workers alone"
    if len(set(digests.values())) > 1:
        return f"digests differ: {digests}"
    if one.is_compared and found["moved"] < HARDLY:
        return f"moves its parameters by {found['moved']:.1e} alone"
    if one.is_compared and not found["distance"] < CLOSE:
        return f"is {found['distance']:.1e} from the plain loop"
    if found.get("accelerate", 0.0) >= CLOSE:
        return f"Accelerate's is {found['accelerate']:.1e} from the plain loop"
    return None


def cells(one: Port, found: dict[str, Any]) -> list[str]:
    """Return a port's row of the table."""

    def counted(after: Sequence[str] | None) -> str:
        return "" if after is None else "+{} \N{MINUS SIGN}{}".format(*changed(one.plain, after))

    wrong = fault(one, found)
    remark = f"**{wrong}** {one.remark}" if wrong else one.remark
    if "refused" in found:
        remark += f" Message: `{found['refused']}`"
    digests = found.get("digests", {})
    same = f"equal: {', '.join(sorted(digests, key=WORKERS.index))}"
    verdict = {0: "", 1: same}.get(len(set(digests.values())), "differ")
    away = ""
    if one.is_compared and "distance" in found:
        away = f"{found['distance']:.0e}" if found["distance"] else "0"
    libraries = ", ".join(one.libraries)
    ours = "" if one.is_refused else counted(one.ported)
    return [
        f"`{one.name}`: {one.title}",
        libraries,
        str(len(one.plain)),
        ours,
        counted(one.accelerated),
        verdict,
        away,
        remark.replace("|", "\\|"),
    ]


def median(numbers: Sequence[int]) -> int:
    """Return the middle number, the upper one of two."""
    return sorted(numbers)[len(numbers) // 2]


def markdown(ports: Sequence[Port], results: dict[str, Any]) -> str:
    """Return the table, and what it comes to."""
    head = ["port", "libraries", "lines", "quorate", "Accelerate", "digests", "distance", "remark"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    shown = [one for one in ports if one.name in results]
    lines += [f"| {' | '.join(cells(one, results[one.name]))} |" for one in shown]
    faults = [one for one in shown if fault(one, results[one.name])]
    refused = [one for one in shown if one.is_refused and one not in faults]
    done = [one for one in shown if one not in faults and one not in refused]
    both = [one for one in done if one.accelerated is not None]
    text = "\n".join(lines)
    text += f"\n\n{len(shown)} ports: {len(done)} with one digest on one worker and on two, "
    text += f"{sum(one.is_compared for one in done)} of them within {CLOSE:.0e} of the plain loop; "
    text += f"{len(refused)} refused, {len(faults)} with a fault.\n"
    if both:
        ours = [changed(one.plain, one.ported) for one in both]
        theirs = [changed(one.plain, one.accelerated or ()) for one in both]
        text += (
            f"\nOf {len(both)} scripts with {median([len(one.plain) for one in both])} lines "
            f"(medians) quorate adds {median([added for added, _ in ours])} and takes away "
            f"{median([gone for _, gone in ours])}; Accelerate adds "
            f"{median([added for added, _ in theirs])} and takes away "
            f"{median([gone for _, gone in theirs])}.\n"
        )
    return text


def main() -> int:
    """Train the ports, print the table, and say whether all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="ports whose names contain one of these")
    parser.add_argument("--environment", type=Path, default=HERE / ".environment")
    parser.add_argument("--python", type=Path, help="an interpreter that has the requirements")
    parser.add_argument("--without-processes", action="store_true", help="towers alone")
    parser.add_argument("--json", type=Path, help="where results are kept")
    parser.add_argument("--markdown", type=Path, help="where the table is written")
    parser.add_argument("--log", type=Path, default=HERE / ".log", help="what the trainings print")
    options = parser.parse_args()
    # The environment's interpreter is a link, which must not be resolved.
    python = options.python.absolute() if options.python else environment(options.environment)
    log = options.log.absolute()
    ports = [port(path) for path in sorted(HERE.glob("*/*.py"))]
    words = options.only or [""]
    chosen = [one for one in ports if any(word in one.name for word in words)]
    by_name = {one.name: one for one in chosen}
    kept: dict[str, Any] = {}
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
    log.write_text("")
    for found in in_one_process(python, chosen, log):
        name = found.pop("port")
        one = by_name[name]
        is_done = "error" in found or (one.is_refused and "refused" in found)
        if not is_done and not options.without_processes:
            found = with_processes(python, one, found, log)
        kept[name] = found
        print(f"{name}: {fault(one, found) or 'as it should be'}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    shown = ports if options.json else chosen
    table = markdown(shown, kept)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"\n{table}\n{machine}. What was printed: {log}")
    if options.markdown:
        before = options.markdown.read_text() if options.markdown.exists() else ""
        start, end = "<!-- table: python ports/run.py -->\n", "<!-- end -->\n"
        if start in before and end in before:
            top, bottom = before.partition(start)[0], before.partition(end)[2]
            options.markdown.write_text(f"{top}{start}\n{table}\n{end}{bottom}")
        else:
            options.markdown.write_text(table)
    return int(any(fault(one, kept[one.name]) for one in chosen if one.name in kept))


if __name__ == "__main__":
    sys.exit(main())
