"""Taking contents out of what was downloaded: gzip, tar archives, zip archives.

A member of an archive is looked up by its exact name and copied to a path of our own, and nothing
else is written: what other names an archive holds, and where they point, does not matter.
"""

from __future__ import annotations

import errno
import gzip
import lzma
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from open_data.sources import one_line

from quorate.data.idx import GZIP_MAGIC
from quorate.errors import DataError

# What the readers of the standard library raise over damaged bytes.
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, struct.error, ValueError, OverflowError, NotImplementedError, RuntimeError),
)


def unpack(source: IO[bytes], target: Path) -> None:
    """Copy a content to a file, uncompressed if it is gzip-compressed.

    Raises:
        DataError: it is damaged.
    """
    with target.open("wb") as copy:
        start = source.read(len(GZIP_MAGIC))
        source.seek(0)
        if start != GZIP_MAGIC:
            shutil.copyfileobj(source, copy)
            return
        try:
            with gzip.GzipFile(fileobj=source) as content:
                shutil.copyfileobj(content, copy)
        except (zlib.error, EOFError, gzip.BadGzipFile) as error:
            got = f"a damaged or cut gzip stream ({error})"
            raise DataError(target.name, got=got, expected="a whole one") from error


def take_out(archive: Path, targets: Mapping[str, Path]) -> None:
    """Copy members of a tar or zip archive to files, each uncompressed if it is gzip-compressed.

    Args:
        archive: A tar archive, compressed or not, or a zip archive (a wheel is one).
        targets: The exact name of a member -> the file to write.

    Raises:
        DataError: the archive is damaged or of another kind, has no such member, or this member is
            no ordinary file (a link, a directory).
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for name, target in targets.items():
                    _take_zipped(archive, zipped, name, target)
        else:
            with tarfile.open(archive) as tar:
                for name, target in targets.items():
                    _take_tarred(archive, tar, name, target)
    except (*_DAMAGE, OSError) as error:
        # A damaged offset may point before the file; a full disk is no damage.
        if type(error) is OSError and error.errno != errno.EINVAL:
            raise
        got = f"a damaged or unknown archive ({one_line(error)})"
        raise DataError(archive.name, got=got, expected="a whole tar or zip archive") from error


def _take_zipped(archive: Path, zipped: zipfile.ZipFile, name: str, target: Path) -> None:
    try:
        member = zipped.getinfo(name)
    except KeyError:
        raise _lacks(archive, name) from None
    kind = member.external_attr >> 16 & 0o170000  # as Unix says it; 0 where no Unix wrote it
    if member.is_dir() or kind not in (0, 0o100000):
        raise _no_file(archive, name)
    with zipped.open(member) as content:
        unpack(content, target)


def _take_tarred(archive: Path, tar: tarfile.TarFile, name: str, target: Path) -> None:
    try:
        member = tar.getmember(name)
    except KeyError:
        raise _lacks(archive, name) from None
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise _no_file(archive, name)
    with content:
        unpack(content, target)


def _lacks(archive: Path, name: str) -> DataError:
    return DataError(archive.name, got=f"no member {name}", expected="a file of this name")


def _no_file(archive: Path, name: str) -> DataError:
    got = f"a link or a directory as {name}"
    return DataError(archive.name, got=got, expected="an ordinary file")
