"""Directories on a node's own disk that belong to one job: temporary files, caches, Ray.

Two runs on one node share nothing here, so neither can attach to the other's Ray, read its compile
cache or delete its files. Ray needs a local disk (it puts sockets there) and a short path (a Unix
socket's is at most 107 bytes).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlprobe.errors import ConfigError, RunError

#: Where the directories are made; for sites whose /tmp is small or not local.
BASE_ENV = "RLPROBE_NODE_TMP"
_DEFAULT_BASE = "/tmp"
#: Ray appends ``/ray/session_{timestamp}_{pid}/sockets/{name}``, 70 bytes at most.
_LONGEST_RAY_PREFIX = 107 - 70
_OWNER = "owner"
_PATIENCE_S = 10.0
_SAFE_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def job_id(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> str:
    """A name no other run on any node of the cluster has at the same time.

    The process number is part of it because one allocation can hold several runs.
    """
    pid = os.getpid() if pid is None else pid
    return f"{environ.get('SLURM_JOB_ID', 'local')}.{pid}"


@dataclass(frozen=True)
class NodeLocal:
    """One job's directories on one node."""

    root: Path

    @property
    def tmp(self) -> Path:
        """The job's /tmp; in a container it is mounted there."""
        return self.root / "tmp"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def make(self) -> None:
        """Make the directories; existing ones must be ours alone.

        Raises:
            RunError: the directory belongs to someone else, is a link, or others can write to it.
        """
        for path in (self.root, self.tmp, self.home):
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                found = path.lstat()
                if (
                    not stat.S_ISDIR(found.st_mode)
                    or found.st_uid != os.getuid()
                    or found.st_mode & 0o022
                ):
                    raise RunError(
                        f"{path} exists and is not this user's own directory; remove it or set "
                        f"{BASE_ENV} to a directory on the node's own disk"
                    ) from None
            except OSError as error:
                raise RunError(
                    f"{path} cannot be made: {error.strerror}; set {BASE_ENV} to a writable "
                    "directory on the node's own disk"
                ) from error

    def own(self) -> None:
        """Note that they live as long as this process, for :func:`sweep`."""
        (self.root / _OWNER).write_text(f"{os.uname().nodename} {os.getpid()}", encoding="utf-8")

    def remove(self) -> None:
        """Remove the directories of a job that has ended.

        Again for a while: Ray's agents notice late that their node is gone, and write on.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists() or time.monotonic() > deadline:
                return
            time.sleep(0.5)


def sweep(environ: Mapping[str, str] = os.environ) -> None:
    """Remove what killed runs of this user left on this node; those that may live are kept."""
    for root in _base(environ).glob("rlprobe-*"):
        with contextlib.suppress(OSError, ValueError):
            node, pid = (root / _OWNER).read_text(encoding="utf-8").split()
            ours = root.lstat().st_uid == os.getuid() and node == os.uname().nodename
            if ours and not Path("/proc", str(int(pid))).exists():
                shutil.rmtree(root, ignore_errors=True)


def of_job(job: str, environ: Mapping[str, str] = os.environ) -> NodeLocal:
    """The directories of a job. The same on every node, and not made yet.

    Raises:
        ConfigError: the job's name or the base directory cannot be part of a path.
    """
    if not _SAFE_JOB.fullmatch(job):
        raise ConfigError(f"job name: found {job!r}; accepted: letters, digits, '.', '_' and '-'")
    return NodeLocal(_base(environ) / f"rlprobe-{job}")


def require(environ: Mapping[str, str] = os.environ, *, contained: bool = False) -> None:
    """Refuse a base directory that no job can use, before a job waits for a node to say so.

    Args:
        environ: where it is looked up.
        contained: every run has an image, in which its directory is /tmp.

    Raises:
        ConfigError: it is not absolute or not plain, or leaves no room for Ray's sockets.
    """
    # the shortest name a job can have: where that one has no room, none has
    shortest = of_job("1.1", environ)
    if not contained:
        check_ray_path(shortest.tmp)


def _base(environ: Mapping[str, str]) -> Path:
    base = Path(environ.get(BASE_ENV) or _DEFAULT_BASE)
    if not base.is_absolute() or not re.fullmatch(r"[A-Za-z0-9_./-]+", str(base)):
        raise ConfigError(
            f"{BASE_ENV}: found {str(base)!r}; accepted: an absolute path of letters, digits and "
            "_ . / - alone"
        )
    return base


def environment(tmp: Path, home: Path) -> dict[str, str]:
    """Variables that send temporary files, caches and Ray to the job's own directories.

    Args:
        tmp: the job's temporary directory as the process sees it.
        home: where caches go, as the process sees it.
    """
    cache = home / "cache"
    return {
        "TMPDIR": str(tmp),
        "RAY_TMPDIR": str(tmp),
        "XDG_CACHE_HOME": str(cache),
        # Models and data are local directories. Looking for a newer copy on a hub would hang on
        # nodes without a route, and could find another model.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(cache / "huggingface"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(cache / "torch_extensions"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "ASCEND_CACHE_PATH": str(cache / "ascend"),
        "ASCEND_WORK_PATH": str(cache / "ascend_work"),
    }


def check_ray_path(tmp: Path) -> None:
    """Refuse a temporary directory whose path is too long for Ray's sockets.

    Raises:
        ConfigError: too long; Ray itself would fail with an unrelated message.
    """
    if len(str(tmp)) > _LONGEST_RAY_PREFIX:
        raise ConfigError(
            f"{tmp} is {len(str(tmp))} bytes long, and Ray's sockets leave room for "
            f"{_LONGEST_RAY_PREFIX}; set {BASE_ENV} to a shorter path"
        )
