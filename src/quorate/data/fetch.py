"""Getting a data set's files once: from the first source that works, verified, into a cache.

A source only puts files into a temporary directory. What they must be is said by their SHA-256,
so every source is held to the same content, and nothing unverified ever has its final name.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import subprocess
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Protocol

from quorate.data.idx import GZIP_MAGIC
from quorate.errors import DataError, SettingError


@dataclass(frozen=True)
class File:
    """A file of a data set."""

    name: str  # in the cache, uncompressed
    sha256: str  # of the uncompressed content, in lower-case hex


class Source(Protocol):
    """A place that files come from."""

    @property
    def title(self) -> str:
        """What messages call it."""

    def get(self, files: Sequence[File], into: Path) -> None:
        """Put the files, uncompressed and under their names, into an existing directory.

        Raises:
            OSError, DataError: with the reason why this source cannot.
        """


def fetch(
    title: str,
    files: Sequence[File],
    sources: Sequence[Source],
    *,
    cache: Path,
    licence: str,
    hint: str,
    say: Callable[[str], None] = print,
) -> Path:
    """Make sure that the cache holds all files, and return it.

    Cached files are hashed on every call; missing and damaged ones are fetched. Several processes
    may do so at once: each works in a directory of its own and renames what it has verified.

    Args:
        title: The data set, in messages.
        files: What is needed.
        sources: Where to get it, in the order to try.
        cache: The directory to keep it in; it and its parents are made.
        licence: Of the data, said when they are fetched.
        hint: What the user can do with files got by hand: it completes "put NAMES ...".
        say: Gets one line for a damaged cached file, and one for what was fetched.

    Raises:
        DataError: no source works (with every source's reason), or the cache cannot be written.
    """
    try:
        wanted = _missing(title, files, cache, say)
        if not wanted:
            return cache
        cache.mkdir(parents=True, exist_ok=True)
        reasons = []
        for source in sources:
            # Beside the cache: on one file system, so that a rename is atomic.
            with TemporaryDirectory(prefix=f".{cache.name}-", dir=cache.parent) as temporary:
                fresh = Path(temporary)
                reason = _attempt(source, wanted, fresh)
                if reason:
                    reasons.append(f"{source.title}: {reason}")
                    continue
                size = sum((fresh / file.name).stat().st_size for file in wanted)
                _keep(wanted, fresh, cache)
            count = f"{len(wanted)} file{'s' if len(wanted) > 1 else ''}"
            say(
                f"{title}: {count}, {size / 1e6:,.1f} MB, from {source.title}, "
                f"cached in {cache}; licence: {licence}"
            )
            return cache
    except OSError as error:
        raise DataError(
            cache,
            got=_one_line(error),
            expected="a directory to cache data in",
            fix="QUORATE_DATA can name another",
        ) from error
    raise DataError(
        title,
        got=f"nothing from any source ({' | '.join(reasons)})",
        expected="one that works",
        fix=f"put {', '.join(file.name for file in files)} {hint}",
    )


@dataclass(frozen=True)
class Https:
    """Files at addresses of their own, plain or gzip-compressed."""

    urls: Mapping[str, str]  # name -> https address
    title: str = "HTTPS"
    timeout_s: float = 20.0  # for each wait on the network

    def __post_init__(self) -> None:
        for url in self.urls.values():
            if not url.startswith("https://"):
                raise SettingError("urls", url, "an https address", "use one")

    def get(self, files: Sequence[File], into: Path) -> None:
        """Download each file. Raises ``OSError`` or ``DataError``."""
        opener = urllib.request.build_opener(_StayOnHttps)
        packed = into / ".download"
        for file in files:
            url = self.urls[file.name]
            try:
                with (
                    opener.open(url, timeout=self.timeout_s) as response,
                    packed.open("wb") as target,
                ):
                    shutil.copyfileobj(response, target)
            except urllib.error.HTTPError as error:
                error.close()  # it holds the connection
                raise DataError(url, got=f"{error.code} {error.reason}", expected="200") from error
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                raise DataError(url, got=_one_line(reason), expected="an answer") from error
            _unpack(packed, into / file.name)
        packed.unlink(missing_ok=True)


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
            room = Path(temporary)
            self._download(room)
            archives = sorted(room.glob("*.deb"))
            if not archives:
                raise DataError("apt-get download", got="no archive", expected=self.package)
            code, reason = self._run(["dpkg", "-x", archives[0].name, "tree"], room)
            if code != 0:
                raise DataError("dpkg -x", got=reason, expected="a sound archive")
            for file in files:
                _unpack(room / "tree" / self.paths[file.name], into / file.name)

    def _download(self, room: Path) -> None:
        # As root, apt would become another user, who may not write here, and warn about it.
        apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=20"]
        code, _ = self._run([*apt, "download", self.package], room)
        if code == 0:
            return

        # The machine's package lists may be missing or old, and only root may renew them: make our
        # own. The hooks that an update runs are about the whole machine, so they are cleared.
        for folder in ("lists/partial", "cache/archives/partial"):
            (room / folder).mkdir(parents=True)
        (room / "apt.conf").write_text(
            "#clear APT::Update::Pre-Invoke;\n"
            "#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
            f'Dir::State::Lists "{room}/lists";\n'
            f'Dir::Cache "{room}/cache";\n'
        )
        apt += ["-c", "apt.conf"]
        # One list of many may fail and the package be in another: only the download decides.
        _, complaint = self._run([*apt, "update"], room)
        code, reason = self._run([*apt, "download", self.package], room)
        if code != 0:
            before = f" (apt-get update: {complaint})" if complaint else ""
            raise DataError("apt-get download", got=f"{reason}{before}", expected="the archive")

    def _run(self, command: Sequence[str], room: Path) -> tuple[int, str]:
        """Run a command in a directory. Returns its exit code and its last line on stderr.

        Raises:
            DataError: there is no such command, or it took too long.
        """
        try:
            done = subprocess.run(
                command,
                cwd=room,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
            )
        except FileNotFoundError:
            missing = f"no command {command[0]}"
            raise DataError(self.package, got=missing, expected="the tools of Debian") from None
        except subprocess.TimeoutExpired:
            late = f"no end of {command[0]} after {self.timeout_s:g} s"
            raise DataError(self.package, got=late, expected="an archive") from None
        lines = done.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return done.returncode, last


class _StayOnHttps(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not to plain HTTP."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith("https://"):
            refusal = f"redirect to {newurl}, which is not https"
            raise urllib.error.HTTPError(req.full_url, code, refusal, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _missing(
    title: str, files: Sequence[File], cache: Path, say: Callable[[str], None]
) -> list[File]:
    """The files that are not in the cache as they should be."""
    missing = []
    for file in files:
        try:
            got = _sha256(cache / file.name)
        except FileNotFoundError:
            missing.append(file)
            continue
        if got != file.sha256:
            say(f"{title}: {cache / file.name} is damaged (SHA-256 {got}): getting it again")
            missing.append(file)
    return missing


def _attempt(source: Source, files: Sequence[File], into: Path) -> str:
    """Let a source put files into a directory and verify them. Returns why it failed, or ""."""
    try:
        source.get(files, into)
        for file in files:
            got = _sha256(into / file.name)
            if got != file.sha256:
                return f"{file.name}: got SHA-256 {got}, expected {file.sha256}"
    except (OSError, DataError) as error:
        return _one_line(error)
    return ""


def _keep(files: Sequence[File], fresh: Path, cache: Path) -> None:
    """Move verified files into the cache, each as a whole even if the power fails."""
    for file in files:
        with (fresh / file.name).open("rb") as content:
            os.fsync(content.fileno())
        os.replace(fresh / file.name, cache / file.name)


def _unpack(packed: Path, target: Path) -> None:
    """Copy a file's content, uncompressed if it is gzip-compressed. Raises ``DataError``."""
    with packed.open("rb") as source, target.open("wb") as copy:
        compressed = source.read(2) == GZIP_MAGIC
        source.seek(0)
        if not compressed:
            shutil.copyfileobj(source, copy)
            return
        try:
            with gzip.GzipFile(fileobj=source) as content:
                shutil.copyfileobj(content, copy)
        except (zlib.error, EOFError, gzip.BadGzipFile) as error:
            got = f"a damaged or cut gzip stream ({error})"
            raise DataError(target.name, got=got, expected="a whole one") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split()) or repr(reason)
