"""Single files of packages that their makers published, without the rest of the wheel.

A wheel of an inference engine has hundreds of megabytes; the index says where it lies, and a zip's
members can be read one by one over HTTP ranges.
"""

from __future__ import annotations

import io
import json
import ssl
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

#: What the packages' wheels are built for; one of them must fit.
_PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_24", "2_17")


def files(requirement: str, names: list[str], place: Path) -> Path:
    """Download members of a published wheel into ``place``; returns it.

    Skips the test where no index can be reached.
    """
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BufferedReader(_Remote(_url(requirement, place)), 1 << 18)) as wheel:
        for name in names:
            wheel.extract(name, place)
    return place


def _url(requirement: str, place: Path) -> str:
    report = place / "report.json"
    platforms = [word for p in _PLATFORMS for word in ("--platform", f"manylinux_{p}_x86_64")]
    for python in ("3.12", "3.11"):  # some wheels are built for one of them only
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary", ":all:", *platforms]
        command += ["--python-version", python, "--target", str(place / "nowhere")]
        done = subprocess.run(
            [*command, "--report", str(report), requirement],
            capture_output=True,
            text=True,
            check=False,
        )
        if "(from versions: none)" in done.stderr:
            pytest.skip(f"no package index can be reached to read {requirement}")
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(report.read_text())["install"]
    return str(found["download_info"]["url"])


class _Remote(io.RawIOBase):
    """A file on a server that serves ranges."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._place = 0
        with self._open("HEAD", {}) as answer:
            self._size = int(answer.headers["Content-Length"])

    def _open(self, method: str, headers: dict[str, str]):
        request = urllib.request.Request(self._url, method=method, headers=headers)
        return urllib.request.urlopen(request, context=ssl.create_default_context(), timeout=120)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = (0, self._place, self._size)[whence] + offset
        return self._place

    def readinto(self, buffer) -> int:
        count = min(len(buffer), self._size - self._place)
        if count <= 0:
            return 0
        last = self._place + count - 1
        with self._open("GET", {"Range": f"bytes={self._place}-{last}"}) as answer:
            assert answer.status == 206, f"{self._url} serves no ranges"
            data = answer.read()
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
