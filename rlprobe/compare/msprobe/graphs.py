"""msprobe's own graph view (``.vis.db``) of a process pair, for its TensorBoard plug-in."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sqlite3
import tempfile
from pathlib import Path

from rlprobe import imports
from rlprobe.errors import RlprobeError
from rlprobe.files import written

SUFFIX = ".vis.db"
#: What msprobe builds a graph of.
_NEEDED = ("dump.json", "construct.json", "stack.json")


def write(benchmark: Path, target: Path, file: Path) -> str | None:
    """Write one graph view, or a database that says why there is none.

    Args:
        benchmark: one process's directory, in a place whose path msprobe accepts.
        target: likewise.
        file: where it goes; parents are made.

    Returns:
        None, or why msprobe wrote none.

    Raises:
        RlprobeError: msprobe or torch is not installed.
    """
    missing = [
        f"{side.name} has no {name}"
        for side in (benchmark, target)
        for name in _NEEDED
        if not (side / name).is_file()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        return explain(file, ", ".join(missing))
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="rlprobe-official-") as aside:
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                _visualize(["-tp", str(target), "-gp", str(benchmark), "-o", aside])
        except RlprobeError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever msprobe raises ends its graph only
            return explain(file, f"{_errors(said.getvalue())} ({error!r})")
        found = sorted(Path(aside).glob(f"*{SUFFIX}"))
        if not found:
            return explain(file, _errors(said.getvalue()))
        with written(file) as temporary:
            shutil.copyfile(found[0], temporary)
    return None


def _visualize(words: list[str]) -> None:
    """``msprobe graph_visualize`` in this process: what its command line calls."""
    try:
        with imports.uncollected():
            from msprobe.visualization import graph_service
    except ImportError as error:
        raise RlprobeError(
            f"msprobe's graph view cannot be made here ({error}); install mindstudio-probe and "
            "torch, or run this command in an image that has them"
        ) from error
    parser = argparse.ArgumentParser()
    graph_service._graph_service_parser(parser)
    graph_service._graph_service_command(parser.parse_args(words))


def _errors(output: str) -> str:
    lines = [line for line in output.splitlines() if "[ERROR]" in line]
    return " ".join(dict.fromkeys(line.split("] ", 1)[-1].strip() for line in lines)) or (
        "it said nothing"
    )


def explain(file: Path, reason: str) -> str:
    """A database of another kind, so that nobody takes a missing one for agreement.

    Returns:
        The reason.
    """
    with written(file) as temporary, contextlib.closing(sqlite3.connect(temporary)) as database:
        database.execute("CREATE TABLE msprobe_wrote_no_graph (why TEXT)")
        database.execute("INSERT INTO msprobe_wrote_no_graph VALUES (?)", (reason,))
        database.commit()
    return reason
