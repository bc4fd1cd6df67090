"""Is the store on storage that can hold the runs, and take hard links?"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlprobe.config import Alignment
from rlprobe.doctor.item import Item, fail, ok, warn
from rlprobe.doctor.size import Size, of_alignment
from rlprobe.errors import ConfigError

#: What msprobe accepts as a dump path; anything else fails after the first stage has run.
_MSPROBE_PATH = re.compile(r"[a-zA-Z0-9_.:/-]+")
_GIB = 1 << 30


def look(alignment: Alignment) -> Iterator[Item]:
    """Items about the store's and the results' directories. Writes two small files and removes
    them."""
    for name in ("store", "results"):
        path = Path(getattr(alignment, name)).expanduser().absolute()
        if _MSPROBE_PATH.fullmatch(str(path)):
            yield ok(f"{name} path", str(path))
        else:
            yield fail(
                f"{name} path",
                f"{path} has characters that msprobe refuses",
                "use letters, digits and _ . : / - only, in the directories above it too",
            )
    store = Path(alignment.store).expanduser().absolute()
    existing = next(path for path in (store, *store.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield fail("store", f"{existing} cannot be written", "choose another store, or its rights")
        return
    yield hard_link(existing)
    try:
        wanted, why = of_alignment(alignment), "the model's config.json is not there"
    except ConfigError as error:  # the item "configuration" fails with it
        wanted, why = None, str(error)
    yield from space(existing, wanted, why)


def hard_link(directory: Path) -> Item:
    """Can two names share one file there?"""
    first = directory / f".rlprobe-doctor-{secrets.token_hex(8)}"
    second = first.with_suffix(".link")
    try:
        first.touch()
        os.link(first, second)
    except OSError as error:
        return warn(
            "store hard links",
            f"{directory}: {error.strerror}",
            "runs will be copied where they could be shared: expect twice the size",
        )
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
    return ok("store hard links", f"work in {directory}")


def space(directory: Path, wanted: Size | None, why: str = "") -> Iterator[Item]:
    """Free space and free inodes against the estimate; ``why`` there is none."""
    free = shutil.disk_usage(directory).free
    status = os.statvfs(directory)
    # Some file systems make inodes as they go, and report none.
    inodes = status.f_favail if status.f_files else None
    if wanted is None:
        yield ok(
            "store space",
            f"{free / _GIB:.1f} GiB free (no estimate: {why})",
        )
        return
    text = f"{free / _GIB:.1f} GiB free, {wanted.bytes / _GIB:.1f} GiB estimated"
    if free < wanted.bytes:
        yield fail("store space", text, "capture fewer steps, ranks or stages, or move the store")
    else:
        yield ok("store space", text)
    if inodes is None:
        return
    text = f"{inodes} free, {wanted.files} estimated"
    if inodes < wanted.files:
        yield fail("store inodes", text, "capture fewer ranks, or move the store")
    else:
        yield ok("store inodes", text)
