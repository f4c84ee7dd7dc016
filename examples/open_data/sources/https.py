"""Files at https addresses of their own."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from open_data.sources import File, one_line
from open_data.sources.unpack import unpack

from quorate.errors import DataError, SettingError


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
                raise DataError(url, got=one_line(reason), expected="an answer") from error
            with packed.open("rb") as content:
                unpack(content, into / file.name)
        packed.unlink(missing_ok=True)


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
