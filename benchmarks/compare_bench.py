"""Comparing, against msprobe's own ``msprobe compare`` on the same dumps in the same run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks import compare_data, processes
from rlprobe.dumps import records
from rlprobe.files import digest
from rlprobe.store import commit, keys

STAGE = "actor_update"
ENTRIES = 100_000
TENSORS = 500
RANKS = 64
#: Calls of a rank whose records are 100,000.
PAGE_ENTRIES = 29_200

_SIDES = ("benchmark", "target")


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run."""

    #: Where dumps are generated; deleted afterwards unless kept.
    directory: Path | None = None
    #: Runs of ours, of which the quickest counts; the peer runs once.
    runs: int = 3
    peer: bool = True
    #: Entries, tensors or ranks, for a smaller run.
    size: int | None = None


def store(settings: Settings) -> dict[str, Any]:
    """Statistics of 100k entries a side, both in the store."""
    with _place(settings, "statistics") as place:
        dumps = _statistics(place, settings.size or ENTRIES)
        sides = [_committed(place, dumps / side) for side in _SIDES]
        return _result("compare-store", place, sides, dumps, settings, _tables(sides))


def sketches(settings: Settings) -> dict[str, Any]:
    """The same with a sketch of 61 floats on every tensor."""
    with _place(settings, "sketches") as place:
        dumps = _statistics(place, settings.size or ENTRIES, sketches=True)
        sides = [_committed(place, dumps / side) for side in _SIDES]
        return _result("compare-sketches", place, sides, None, settings, _tables(sides))


def plain(settings: Settings) -> dict[str, Any]:
    """Statistics of 100k entries a side, from plain dump.json files."""
    with _place(settings, "statistics") as place:
        dumps = _statistics(place, settings.size or ENTRIES)
        sides = [dumps / side for side in _SIDES]
        files = [side / "dump.json" for side in sides]
        return _result("compare-json", place, sides, dumps, settings, files)


def tensors(settings: Settings) -> dict[str, Any]:
    """500 tensors of 4.6 GB, all different, page cache warm."""
    with _place(settings, "tensors") as place:
        dumps = _made(place / "dumps", lambda p: compare_data.tensors(p, settings.size or TENSORS))
        _warm(dumps)
        sides = [dumps / side for side in _SIDES]
        return _result("compare-tensors", place, sides, dumps, settings)


def equal(settings: Settings) -> dict[str, Any]:
    """The same, 90 % of them equal, from the store."""
    with _place(settings, "equal") as place:
        count = settings.size or TENSORS
        dumps = _made(place / "dumps", lambda p: compare_data.tensors(p, count, equal=0.9))
        sides = [_committed(place, dumps / side) for side in _SIDES]
        _warm(dumps)
        return _result("compare-equal", place, sides, dumps, settings, _tables(sides))


def ranks64(settings: Settings) -> dict[str, Any]:
    """64 ranks of 100k entries a side, from the store."""
    with _place(settings, "ranks") as place:
        dumps = _statistics(place, ENTRIES)
        count = settings.size or RANKS
        sides = [_many_ranks(place / side, dumps / side, count) for side in _SIDES]
        return _result("compare-64ranks", place, sides, None, settings, _tables(sides))


def page64(settings: Settings) -> dict[str, Any]:
    """The page of 64 ranks of 100k records a side, and once diagnosing them; compared before."""
    with _place(settings, "page") as place:
        dumps = _made(place / "dumps", lambda p: compare_data.statistics(p, PAGE_ENTRIES))
        count = settings.size or RANKS
        sides = [_many_ranks(place / side, dumps / side, count) for side in _SIDES]
        out, program = place / "out", processes.program("rlprobe")
        processes.timed([program, "compare", *map(str, sides), "-o", str(out), "-q"], place)
        judged = processes.timed([program, "diagnose", str(out), "-q", "--no-fail"], place)
        command = [program, "report", str(out), "-q"]
        ours = processes.quickest([processes.timed(command, place) for _ in range(settings.runs)])
        _tell("report-64ranks", ours, None, _bytes_read_once([out / "judged"]))
        return {
            "name": "report-64ranks",
            "ours_s": round(ours.seconds, 3),
            "peer_s": None,
            "ratio": None,
            "ours_mib": round(ours.mib),
            "peer_mib": None,
            "diagnose_s": round(judged.seconds, 3),
            "diagnose_mib": round(judged.mib),
            "page_mib": round((out / "report.html").stat().st_size / 2**20, 1),
            "command": " ".join(["rlprobe", *command[1:]]),
        }


BENCHMARKS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "compare-store": store,
    "compare-sketches": sketches,
    "compare-json": plain,
    "compare-tensors": tensors,
    "compare-equal": equal,
    "compare-64ranks": ranks64,
    "report-64ranks": page64,
}


def _result(
    name: str,
    place: Path,
    sides: list[Path],
    dumps: Path | None,
    settings: Settings,
    read: Sequence[Path] = (),
) -> dict[str, Any]:
    """Time ours on ``sides`` and the peer on ``dumps`` (None: there is no peer).

    Args:
        read: what ours has to read at least, for the floor; else all of ``sides``.
    """
    command = [processes.program("rlprobe"), "compare", *map(str, sides)]
    command += ["-o", str(place / "out"), "-q"]
    # once before: what is compiled on first use is then on disk, for either side
    processes.timed(command, place)
    # half before the peer and half after it, so that a neighbour's load counts against both
    before = (settings.runs + 1) // 2
    done = [processes.timed(command, place) for _ in range(before)]
    peer = None
    if dumps is not None and settings.peer:
        theirs = [processes.program("msprobe"), "compare", "-o", str(place / "peer")]
        theirs += ["-tp", str(dumps / "target/dump.json")]
        theirs += ["-gp", str(dumps / "benchmark/dump.json")]
        # one BLAS thread a process is msprobe's better case
        peer = processes.timed(theirs, place, {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    done += [processes.timed(command, place) for _ in range(settings.runs - before)]
    ours = processes.quickest(done)
    floor = _bytes_read_once(read or sides)
    _tell(name, ours, peer, floor)
    return {
        "name": name,
        "ours_s": round(ours.seconds, 3),
        "peer_s": round(peer.seconds, 3) if peer else None,
        "ratio": round(peer.seconds / ours.seconds, 1) if peer else None,
        "ours_mib": round(ours.mib),
        "peer_mib": round(peer.mib) if peer else None,
        "command": " ".join(["rlprobe", *command[1:]]),
    }


def _tables(runs: Sequence[Path]) -> list[Path]:
    """The record tables of stored runs."""
    return [run / "records" / f"{STAGE}.parquet" for run in runs]


def _bytes_read_once(paths: Sequence[Path]) -> tuple[float, float]:
    """MiB of these files, and seconds to read them once from the page cache, in one thread."""
    files = {
        file
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file() and file.suffix in (".json", ".parquet", ".pt")
    }
    buffer = bytearray(1 << 22)
    for _ in range(2):  # the first warms the cache
        size, start = 0, time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while count := opened.readinto(buffer):
                    size += count
    return size / 2**20, time.perf_counter() - start


def _tell(
    name: str, ours: processes.Run, peer: processes.Run | None, floor: tuple[float, float]
) -> None:
    """What the result has no place for: processor time, and the floor."""
    said = f"{name}: ours {ours.cpu:.2f} s of processor time"
    if peer is not None:
        said += f", peer {peer.cpu:.2f} s (ratio {peer.cpu / ours.cpu:.0f})"
    said += f"; floor: {floor[0]:.0f} MiB read once in {floor[1]:.3f} s"
    sys.stderr.write(f"{said}\n")


@contextmanager
def _place(settings: Settings, name: str) -> Iterator[Path]:
    """A directory for generated dumps: kept where the caller named one."""
    if settings.directory is not None:
        place = settings.directory / name
        place.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place / "out", ignore_errors=True)
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="rlprobe-benchmark-") as temporary:
        yield Path(temporary)


def _made(path: Path, make: Callable[[Path], Any]) -> Path:
    """Generate a dump once; a half-made one is made again."""
    done = path / ".done"
    if not done.is_file():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        make(path)
        done.touch()
    return path


def _statistics(place: Path, entries: int, *, sketches: bool = False) -> Path:
    name = "sketched" if sketches else "dumps"
    return _made(
        place / name, lambda path: compare_data.statistics(path, entries, sketches=sketches)
    )


def _committed(place: Path, rank_directory: Path) -> Path:
    """The run of a store that holds one side's dump."""
    declared = {"role": rank_directory.name, "place": str(rank_directory)}
    key = keys.run_key(declared)
    run = place / "store/runs" / key
    if not run.is_dir():
        scratch = place / f"scratch-{rank_directory.name}"
        where = scratch / "dump" / STAGE / "step0" / "rank0"
        (scratch / "side").mkdir(parents=True, exist_ok=True)
        shutil.copytree(rank_directory, where, copy_function=os.link, dirs_exist_ok=True)
        commit.commit(scratch, place / "store", key, declared)
        shutil.rmtree(scratch)
    return run


def _many_ranks(run: Path, rank_directory: Path, count: int) -> Path:
    """A run whose record table holds one dump as many ranks, each with values of its own."""
    table = run / "records" / f"{STAGE}.parquet"
    if not table.is_file():
        table.parent.mkdir(parents=True, exist_ok=True)
        where = records.RankDirectory(0, 0, rank_directory)
        base = records.build_rank(where, stacks=False)
        parts = run / "parts"
        parts.mkdir(exist_ok=True)
        for rank in range(count):
            shifted = base.with_columns(
                pl.lit(rank, pl.Int32).alias("rank"),
                *(pl.col(name) * (1 + rank / 1000) for name in ("max", "min", "mean", "norm")),
            )
            records.write(shifted, parts / f"{rank:04}.parquet")
        pl.scan_parquet(parts / "*.parquet").sink_parquet(
            table, compression="zstd", compression_level=1, row_group_size=1 << 17
        )
        shutil.rmtree(parts)
        row = {"path": f"records/{table.name}", **digest(table)._asdict()}
        (run / "manifest.json").write_text(json.dumps({"files": [row]}))
    return run


def _warm(directory: Path) -> None:
    """Read every file once, so that both programs find it in the page cache."""
    buffer = bytearray(1 << 22)
    for path in directory.rglob("*.pt"):
        with path.open("rb") as file:
            while file.readinto(buffer):
                pass
