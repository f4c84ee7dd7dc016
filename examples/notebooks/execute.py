"""Execute the notebooks of this folder: copies with outputs are made, and what they train.

    python examples/notebooks/execute.py                   # all of them, into build/notebooks
    python examples/notebooks/execute.py update_rules      # one
    python examples/notebooks/execute.py --to FOLDER       # elsewhere

A cell that raises ends it with that cell's traceback. It needs the extra `notebooks`.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parents[1] / "build" / "notebooks"  # what lies there is of an earlier time
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
CELL_S = 300  # that a cell may take


def execute(name: str, folder: Path) -> nbformat.NotebookNode:
    """Execute a notebook in a folder, beside a folder ``open_data``, and return it with outputs."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_S,
        kernel_name="python3",
        coalesce_streams=True,  # a line of the display is written at a time
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata.pop("language_info")  # has the version of Python that happened to run it
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def laid_out(to: Path) -> Path:
    """Return a new folder to execute notebooks in, where ``..`` has what they import."""
    folder = to / "folder"
    folder.mkdir(parents=True)
    (to / "open_data").symlink_to(FOLDER.parent / "open_data")
    return folder


def main() -> None:
    """Execute notebooks, and say how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--to", type=Path, default=BUILD, help="a new folder")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.to == BUILD:
        shutil.rmtree(BUILD, ignore_errors=True)
    folder = laid_out(options.to)
    for name in options.names or NAMES:
        begun = time.monotonic()
        notebook = execute(name, folder)
        nbformat.write(notebook, options.to / f"{name}.ipynb")
        print(f"{options.to / name}.ipynb: {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
