"""Parquet files that nobody vouches for: what reading one may end in, and reading it apart.

A file that is damaged, or made to harm, can say of itself that it holds more than any machine has;
polars then asks for that much, and ends the process without an exception. What comes from
elsewhere is therefore read once in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl

#: polars panics over some damaged files, which is no Exception to Python.
UNREADABLE = (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException)

_REFUSED = 3


def try_apart(paths: Sequence[Path]) -> tuple[Path, str] | None:
    """Read files in another process, each whole.

    Args:
        paths: Parquet files.

    Returns:
        The first that cannot be read, and why; None where all can.
    """
    if not paths:
        return None
    done = subprocess.run(
        [sys.executable, "-m", "rlprobe.dumps.parquet", *map(str, paths)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return None
    number = done.stdout.count("\n") - 1
    if number < 0:
        raise OSError(f"no process can be started to read {paths[0]}: {done.stderr[-200:]}")
    last = (done.stderr.strip().splitlines() or ["it ended the process that read it"])[
        -1 if done.returncode == _REFUSED else 0
    ]
    return paths[number], last


def main(paths: Sequence[str]) -> int:
    """The other process: a line on stdout before each file, the reason on stderr."""
    for path in paths:
        print(path.encode("utf-8", "backslashreplace").hex(), flush=True)
        try:
            pl.read_parquet(path, glob=False)
        except UNREADABLE as error:
            print(str(error).partition("\n")[0], file=sys.stderr)
            return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
