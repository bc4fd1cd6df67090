"""``rlprobe official-table BENCHMARK TARGET -o OUT``: msprobe's own tables, written by msprobe.

One process for all stages, because importing msprobe and torch takes longer than most tables do.
``OUT/{stage}/official.{csv,xlsx}`` is the first captured step's lowest rank; other ranks, other
steps (``--steps all``) and debug.json stand beside it (``official-step1-rank0-debug.csv``).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlprobe.cli.common import write_json
from rlprobe.compare import planner, sides
from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.compare.sides import DumpStage, Process, RunStage, StageSource
from rlprobe.errors import NotComparableError, RlprobeError
from rlprobe.store import packing, records
from rlprobe.store.objects import linked

_log = logging.getLogger(__name__)

NAME = "official"
_KINDS = ("csv", "xlsx")
#: Paths that msprobe accepts.
_ACCEPTED = re.compile(r"^[a-zA-Z0-9_.:/-]+$")
_FILES = (records.DUMP, records.DEBUG, records.STACK, "construct.json")

#: ``msprobe.pytorch.compare.pt_compare.pt_compare``.
PtCompare = Callable[..., None]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "official-table",
        help="write msprobe's own comparison table (needs torch)",
        description="Run `msprobe compare` on every stage, in one process, and keep its CSV and "
        "XLSX as OUT/{stage}/official.csv and .xlsx.",
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", help="as for compare")
    parser.add_argument("target", metavar="TARGET", help="as for compare")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--stage", action="append", default=[], help="only this stage (repeatable)")
    parser.add_argument("--store", type=Path, help="where run keys are looked up")
    parser.add_argument(
        "--steps",
        choices=("first", "all"),
        default="first",
        help="the first captured step (default), or every one",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    pt_compare = _msprobe()
    benchmark = sides.resolve(args.benchmark, args.store)
    target = sides.resolve(args.target, args.store)
    results: list[dict[str, Any]] = []
    for stage in planner.plan(benchmark, target, args.stage):
        if stage.benchmark is not None and stage.target is not None:
            results += _stage_tables(pt_compare, stage, args.out / stage.stage, args.steps)
        else:
            _explain(args.out / stage.stage, NAME, "the stage is on one side only")
    if args.json is not None:
        write_json(args.json, results)
    if not any(result["written"] for result in results):
        reasons = {result["message"] for result in results} or {"no stage is on both sides"}
        raise NotComparableError(f"msprobe wrote no table: {'; '.join(sorted(reasons))}")
    return 0


def _msprobe() -> PtCompare:
    """msprobe's comparison of two files.

    Raises:
        RlprobeError: msprobe or torch is not installed.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a false complaint about CANN
            from msprobe.pytorch.compare.pt_compare import pt_compare
    except ImportError as error:
        raise RlprobeError(
            f"official-table runs msprobe itself, which cannot be imported here ({error}); install "
            "mindstudio-probe and torch, or run this command in an image that has them. "
            "`rlprobe compare` needs neither"
        ) from error
    return pt_compare  # type: ignore[no-any-return]


def _stage_tables(
    pt_compare: PtCompare, stage: StagePlan, out: Path, steps: str
) -> Iterator[dict[str, Any]]:
    """Tables of one stage's process pairs; the first keeps the plain name."""
    pairs = [p for p in stage.pairings if p.benchmark is not None and p.target is not None]
    if steps == "first":
        pairs = [p for p in pairs if p.step == pairs[0].step]
    for number, pairing in enumerate(pairs):
        with _laid_out(stage, pairing) as (benchmark, target):
            for file, suffix in ((records.DUMP, ""), (records.DEBUG, "-debug")):
                if not ((benchmark / file).is_file() and (target / file).is_file()):
                    continue
                place = f"-step{pairing.step}-rank{pairing.rank}" if number else ""
                message = _table(
                    pt_compare, benchmark / file, target / file, out, f"{NAME}{place}{suffix}"
                )
                if message:
                    _log.warning("%s: msprobe wrote no table: %s", stage.stage, message)
                yield {
                    "stage": stage.stage,
                    "step": pairing.step,
                    "rank": pairing.rank,
                    "file": f"{NAME}{place}{suffix}",
                    "written": message is None,
                    "message": message,
                }
    if not (out / f"{NAME}.csv").is_file():
        _explain(out, NAME, "no process has a dump.json on both sides")


def _table(
    pt_compare: PtCompare, benchmark: Path, target: Path, out: Path, name: str
) -> str | None:
    """Both formats of one table; None, or why msprobe wrote none."""
    out.mkdir(parents=True, exist_ok=True)
    for kind in _KINDS:
        with tempfile.TemporaryDirectory() as aside:
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    pt_compare(
                        {"npu_path": str(target), "bench_path": str(benchmark)},
                        aside,
                        xlsx=kind == "xlsx",
                    )
            except Exception as error:  # noqa: BLE001 - whatever msprobe raises ends its table only
                return _explain(out, name, f"{_complaints(said.getvalue())} ({error!r})")
            written = sorted(Path(aside).glob(f"*.{kind}"))
            if not written:
                return _explain(out, name, _complaints(said.getvalue()))
            shutil.copyfile(written[0], out / f"{name}.{kind}")
    return None


def _explain(out: Path, name: str, reason: str) -> str:
    """Files that say why there is no table, so that nobody takes a missing one for agreement."""
    from openpyxl import Workbook  # type: ignore[import-untyped]

    out.mkdir(parents=True, exist_ok=True)
    text = reason.replace('"', "'")
    (out / f"{name}.csv").write_text(f'"msprobe wrote no table"\n"{text}"\n', encoding="utf-8")
    book = Workbook()
    for row in ("msprobe wrote no table", text):
        book.active.append([row])
    book.save(out / f"{name}.xlsx")
    return reason


def _complaints(output: str) -> str:
    """What msprobe complained about."""
    lines = [line for line in output.splitlines() if "[ERROR]" in line or "[WARNING]" in line]
    texts = dict.fromkeys(line.split("] ", 1)[-1].strip() for line in lines)
    return " ".join(texts) or "it said nothing"


@contextlib.contextmanager
def _laid_out(stage: StagePlan, pairing: Pairing) -> Iterator[tuple[Path, Path]]:
    """Both processes' files as plain files, in a place whose path msprobe accepts."""
    with tempfile.TemporaryDirectory(prefix="rlprobe-official-") as aside:
        if not _ACCEPTED.match(aside):
            raise RlprobeError(
                f"msprobe refuses the path {aside}: set TMPDIR to one of letters, digits and _.:/-"
            )
        places = []
        for name, source, process in (
            ("benchmark", stage.benchmark, pairing.benchmark),
            ("target", stage.target, pairing.target),
        ):
            assert source is not None and process is not None
            places.append(_copy(_directory(source, process), Path(aside) / name))
        yield places[0], places[1]


def _directory(source: StageSource, process: Process) -> Path:
    if isinstance(source, DumpStage):
        path = source.paths[process]
        return path.parent if path.is_file() else path
    assert isinstance(source, RunStage)
    if source.tree is None:
        raise RlprobeError(f"{source.table}: the run has no dump tree; `rlprobe store verify` it")
    return source.tree / f"step{process.step}" / f"rank{process.rank}"


def _copy(directory: Path, place: Path) -> Path:
    place.mkdir()
    for name in _FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, place / name)
    tensors = directory / records.TENSORS
    packed = directory / f"{records.TENSORS}{packing.SUFFIX}"
    if tensors.is_dir() or packed.is_file():
        (place / records.TENSORS).mkdir()
    if tensors.is_dir():
        for file in tensors.iterdir():
            if file.is_file() and not linked(file, place / records.TENSORS / file.name):
                shutil.copyfile(file, place / records.TENSORS / file.name)
    if packed.is_file():
        for name, content in packing.unpack(packed):
            (place / records.TENSORS / name).write_bytes(content)
    return place
