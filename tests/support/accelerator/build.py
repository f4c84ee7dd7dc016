"""The library of the simulated accelerator, compiled once for each torch."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "device"
BUILT = Path(__file__).parents[3] / "build" / "accelerator"
COMPILER = "g++"
LIBRARIES = ("c10", "torch_cpu", "torch_python")
LIMIT_S = 540


def lacking() -> str | None:
    """Return why the device is impossible here; None: the device is possible."""
    if sys.platform != "linux":
        return "the simulated accelerator needs Linux"
    if shutil.which(COMPILER) is None:
        return f"the simulated accelerator needs {COMPILER}"
    if torch.version.cuda or torch.version.hip:
        return "the simulated accelerator is made for torch's CPU build"
    return None


def library() -> Path:
    """Return the library, compiled if need be: half a minute, a gigabyte of memory.

    Raises:
        RuntimeError: with the output of the compiler.
    """
    files = sorted(SOURCES.iterdir())
    known = "".join(file.read_text() for file in files) + torch.__version__ + sys.version
    built = BUILT / hashlib.sha256(known.encode()).hexdigest()[:16] / "sim.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile([file for file in files if file.suffix == ".cpp"], built)
    return built


def _compile(files: list[Path], built: Path) -> None:
    package = Path(torch.__file__).parent
    libraries = package / "lib"
    unfinished = built.with_suffix(".unfinished")
    words = [
        *(COMPILER, "-std=c++20", "-shared", "-fPIC", "-O1", "-g0"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in (SOURCES, package / "include")),
        f"-I{package / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        *("-x", "c++", "-", "-o", str(unfinished)),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", *(f"-l{name}" for name in LIBRARIES)),
    ]
    # As a single unit: torch's headers take most of the time, and are read once.
    source = "".join(f'#include "{file.name}"\n' for file in files)
    ended = subprocess.run(
        words, input=source, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if ended.returncode != 0:
        raise RuntimeError(f"the simulated accelerator was not compiled:\n{ended.stderr[-4000:]}")
    unfinished.replace(built)
