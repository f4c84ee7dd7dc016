"""Copies of a source tree, each with a changed file."""

import os
import shutil
import subprocess
from pathlib import Path


def environment(tree: Path, *others: Path) -> dict[str, str]:
    """Return the environment for programs that import the package of a tree."""
    paths = [str(tree / "src"), *map(str, others)]
    # Leave out the present test's name, as all contexts of coverage would have the same name, and
    # the switch by which a flush that is left out changes nothing.
    without = ("PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED")
    env = {name: value for name, value in os.environ.items() if name not in without}
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}


def copy(tree: Path, folder: Path) -> None:
    """Copy the files of a tree that git tracks, or would: unchanged, without history."""
    listing = "ls-files --cached --others --exclude-standard -z"
    listed = ["git", "-C", str(tree), *listing.split()]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
