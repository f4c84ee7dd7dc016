"""Files inside a Debian package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from open_data.sources import File
from open_data.sources.command import run
from open_data.sources.unpack import unpack

from quorate.errors import DataError


@dataclass(frozen=True)
class DebianPackage:
    """Files inside a Debian package, which is downloaded and unpacked, never installed; no root."""

    package: str
    paths: Mapping[str, str]  # name -> path inside the package, plain or gzip-compressed
    timeout_s: float = 600.0  # for each command

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"the Debian package {self.package}"

    def get(self, files: Sequence[File], into: Path) -> None:
        """Download the package with apt-get, and take the files out. Raises ``DataError``."""
        with TemporaryDirectory(prefix=".deb-", dir=into) as temporary:
            scratch = Path(temporary)
            self._download(scratch)
            archives = sorted(scratch.glob("*.deb"))
            if not archives:
                raise DataError("apt-get download", got="no archive", expected=self.package)
            code, reason = self._run(["dpkg", "-x", archives[0].name, "tree"], scratch)
            if code != 0:
                raise DataError("dpkg -x", got=reason, expected="a sound archive")
            for file in files:
                with (scratch / "tree" / self.paths[file.name]).open("rb") as content:
                    unpack(content, into / file.name)

    def _download(self, scratch: Path) -> None:
        # As root, apt would become another user, who may not write here, and warn about it.
        apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=20"]
        code, _ = self._run([*apt, "download", self.package], scratch)
        if code == 0:
            return

        # The machine's package lists may be missing or old, and only root may renew them: make our
        # own. The hooks that an update runs are about the whole machine, so they are cleared.
        for folder in ("lists/partial", "cache/archives/partial"):
            (scratch / folder).mkdir(parents=True)
        (scratch / "apt.conf").write_text(
            "#clear APT::Update::Pre-Invoke;\n"
            "#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
            f'Dir::State::Lists "{scratch}/lists";\n'
            f'Dir::Cache "{scratch}/cache";\n'
        )
        apt += ["-c", "apt.conf"]
        # One list of many may fail and the package be in another: only the download decides.
        _, complaint = self._run([*apt, "update"], scratch)
        code, reason = self._run([*apt, "download", self.package], scratch)
        if code != 0:
            before = f" (apt-get update: {complaint})" if complaint else ""
            raise DataError("apt-get download", got=f"{reason}{before}", expected="the archive")

    def _run(self, command: Sequence[str], scratch: Path) -> tuple[int, str]:
        return run(
            command,
            scratch,
            package=self.package,
            needs="the tools of Debian",
            timeout_s=self.timeout_s,
        )
