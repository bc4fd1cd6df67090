"""Whether the lock that a workflow left in its directory may be taken away.

    python -m rlprobe.runs.workflowlock            exit 0: there is none; 3: its workflow is known
                                                   to be dead; 1: it lives, or nobody can tell
    python -m rlprobe.runs.workflowlock -- CMD…    becomes CMD, having written down who that is

Snakemake's lock says nothing about who holds it, and a directory may be on storage that many hosts
see. So ``workflow/align`` starts Snakemake through this, which leaves the host, the process and
when that began in ``.snakemake/rlprobe-holder.json``. Of a Snakemake that was started by hand
nothing is known, unless the directory is on a disk of this host alone: then one can look.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlprobe.claims import Holder
from rlprobe.files import replace_bytes

HOLDER = Path(".snakemake/rlprobe-holder.json")
LOCKS = Path(".snakemake/locks")
FREE, UNKNOWN, DEAD = 0, 1, 3
#: File systems that only one host has at a time.
_OF_ONE_HOST = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
#: Snakemake takes its lock soon after it starts; a later lock is another Snakemake's.
_SOON = 600.0


def main(words: list[str]) -> int:
    if words[:1] == ["--"]:
        replace_bytes(HOLDER, Holder.me().to_bytes())
        os.execvp(words[1], words[1:])
    state, message = look(Path.cwd())
    if message:
        sys.stderr.write(f"{message}\n")
    return state


def look(directory: Path) -> tuple[int, str]:
    """Who holds the workflow's lock in a directory.

    Returns:
        :data:`FREE`, :data:`DEAD` or :data:`UNKNOWN`, and what to tell the user.
    """
    try:
        locks = [path.stat().st_mtime for path in (directory / LOCKS).iterdir()]
    except FileNotFoundError:
        locks = []
    if not locks:
        return FREE, ""
    holder = Holder.read(directory / HOLDER)
    if holder is not None and max(locks) - (directory / HOLDER).stat().st_mtime > _SOON:
        holder = None  # written by an earlier one than the lock is of
    here = _running_here(directory)
    if here is not None:
        return UNKNOWN, (
            f"A workflow runs in {directory} already: process {here} on this host. Wait for it, or "
            "end it."
        )
    if (holder is not None and holder.is_dead()) or (holder is None and _of_one_host(directory)):
        return DEAD, "The last workflow in this directory was killed; its lock is taken away."
    who = f"process {holder.pid} on {holder.host}" if holder else "nobody knows which host"
    return UNKNOWN, (
        f"{directory} is locked by a workflow ({who}) that may still run there. When you know that "
        "it does not: `snakemake --unlock`, then the same command again."
    )


def _running_here(directory: Path) -> int | None:
    """Another Snakemake on this host that works in the directory."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            works_here = process.joinpath("cwd").readlink() == directory
            words = process.joinpath("cmdline").read_bytes().split(b"\0") if works_here else []
        except OSError:
            continue
        if any(Path(os.fsdecode(word)).name == "snakemake" for word in words):
            return int(process.name)
    return None


def _of_one_host(directory: Path) -> bool:
    """Whether the directory is on a file system that other hosts cannot see."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] in _OF_ONE_HOST
    return False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
