"""The map of files in architecture.md, made from the first line of each module's docstring.

python docs/map_of_files.py            # writes it
python docs/map_of_files.py --check    # exit code 1 if it is not what the modules say
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "maintainers" / "architecture.md"
PACKAGE = ROOT / "src" / "quorate"
BEGIN, END = "<!-- map: python docs/map_of_files.py -->\n", "<!-- end of the map -->\n"

ROOMS = {  # in the order of the picture
    "": "the front door, settings and errors",
    "commands": "the subcommands of quorate",
    "callbacks": "what many runs want of callbacks; public",
    "testing": "workers in memory, for tests; public",
    "training": "the loop: state, update, fit, resume",
    "services": "what runs beside the loop",
    "engines": "how workers are reached",
    "data": "from files to batches; public",
    "simulation": "the coordinator in virtual time, and what a run of any size would do; pure",
    "replica": "one shard on one device, and its weighted gradient",
    "coordination": "who computes what and when to update; pure",
    "machine": "devices, memory, cores, environment",
}


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; an empty one if there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def table(folder: Path) -> str:
    """Return a table of the modules of one folder."""
    rows = [
        f"| `{path.name}` | {first_line(path).replace('``', '`')} |\n"
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py" or first_line(path)
    ]
    return "| file | |\n|---|---|\n" + "".join(rows) + "\n"


def map_of_files() -> str:
    """Return the map: a heading per room, and a table per folder."""
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
    rooms = {folder.relative_to(PACKAGE).parts[0] for folder in folders if folder != PACKAGE}
    if new := rooms - ROOMS.keys():
        raise SystemExit(f"docs/map_of_files.py says nothing of the rooms {sorted(new)}")
    text = ""
    for room, about in ROOMS.items():
        if room and room not in rooms:
            continue
        text += f"### `{room or 'quorate'}/`: {about}\n\n"
        inside = (
            [PACKAGE] if not room else [f for f in folders if PACKAGE / room in (f, *f.parents)]
        )
        for folder in inside:
            if not any(path.name != "__init__.py" for path in folder.glob("*.py")):
                continue
            if folder != PACKAGE / room:
                text += f"`{folder.relative_to(PACKAGE)}/`\n\n"
            text += table(folder)
    return text


def main() -> int:
    """Write the map, or with --check compare it."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    new = f"{before}{BEGIN}\n{map_of_files()}{END}{after}"
    if "--check" in sys.argv:
        if new != page:
            print(f"{PAGE} is out of date: python docs/map_of_files.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
