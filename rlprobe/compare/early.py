"""What a comparison begins before polars is imported, which takes as long as the beginning itself.

Digests of record tables are taken in a thread, and a process that will decode a large dump.json
imports what it needs. Both are guesses from the names of the two sides: whoever needs the result
asks for it in the usual way, and says what is wrong.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path

from rlprobe import files
from rlprobe.imports import postpone

#: Share of both sides' records that must have been compared.
COVERAGE = 0.9
#: Bytes of dump.json from which decoding in another process pays for starting it.
WORTHWHILE = 16 << 20
#: What is looked at in each directory, and how deep, for a large dump.json.
_CHILDREN, _DEPTH = 8, 3


def prepare() -> None:
    """What makes the import of polars quicker."""
    # read only where one of its plug-ins is asked for: a tenth of the import
    postpone("importlib.metadata")


@contextlib.contextmanager
def begun(sides: Iterable[str], jobs: int) -> Iterator[Executor | None]:
    """Begin what these two sides will need; in the block, a process to decode in, or None.

    Args:
        sides: what the user called them; a run's key is not looked up.
        jobs: with one, nothing runs beside this process.
    """
    paths = [path for name in sides if (path := Path(name)).exists()]
    threading.Thread(target=_digest, args=(paths,), daemon=True).start()
    if jobs < 2 or len(paths) < 2 or not all(_large(path, _DEPTH) for path in paths):
        yield None
        return
    with pool(1) as executor:
        executor.submit(os.getpid)  # the process starts with the first thing that it has to do
        yield executor


def pool(workers: int) -> Executor:
    """Processes that decode dump files (:mod:`rlprobe.dumps.decoding`)."""
    # Imported here: most comparisons need none of it.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_beside)


def _beside() -> None:
    prepare()
    # what these processes make is kept until they end: looking for garbage in it takes a tenth
    gc.disable()
    importlib.import_module("rlprobe.dumps.decoding")


def _digest(runs: Iterable[Path]) -> None:
    """The digests of stored runs' record tables, which are asked for one by one later.

    One thread for all of them: a second would take its time from the imports.
    """
    for run in runs:
        with contextlib.suppress(OSError):
            if (run / "manifest.json").is_file():
                for table in sorted((run / "records").glob("*.parquet")):
                    files.seen_digest(table)


def _large(path: Path, depth: int) -> bool:
    """Whether a dump.json among the first below ``path`` is worth another process."""
    try:
        file = path if path.is_file() else path / "dump.json"
        if file.is_file():
            return file.stat().st_size >= WORTHWHILE
        with os.scandir(path) as entries:
            below = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return False
    return depth > 0 and any(_large(path / name, depth - 1) for name in below[:_CHILDREN])
