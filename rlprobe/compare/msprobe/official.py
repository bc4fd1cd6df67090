"""msprobe's own tables, written by msprobe.

``OUT/{stage}/official.{csv,xlsx}`` is the first captured step's lowest rank; other ranks, other
steps and debug.json stand beside it (``official-step1-rank0-debug.csv``), and on request msprobe's
graph view of each process (``official.vis.db``).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlprobe import imports
from rlprobe.compare.msprobe import graphs
from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.compare.sides import Side
from rlprobe.compare.stage_sources import DumpStage, Process, RunStage, StageSource
from rlprobe.compare.traininfer import sources
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps import dumpjson, records
from rlprobe.errors import DumpError, RlprobeError
from rlprobe.files import replace_text, written
from rlprobe.store import packing
from rlprobe.store.objects import linked

_log = logging.getLogger(__name__)

NAME = "official"
_KINDS = ("csv", "xlsx")
#: Paths that msprobe accepts.
_ACCEPTED = re.compile(r"^[a-zA-Z0-9_.:/-]+$")
_FILES = (records.DUMP, records.DEBUG, records.STACK, "construct.json")

_LAYER = re.compile(r"(\blayers\.\d+\.)")

#: ``msprobe.pytorch.compare.pt_compare.pt_compare``.
PtCompare = Callable[..., None]


def write(
    plan: Sequence[StagePlan], out: Path, *, every_step: bool = False, graph: bool = False
) -> list[dict[str, Any]]:
    """Write ``out/{stage}/official.{csv,xlsx}`` of each stage, or why there is none.

    Args:
        plan: what is compared with what.
        every_step: tables of all steps, not of the first alone.
        graph: msprobe's graph view too, ``official.vis.db``.

    Returns:
        Of each table stage, step, rank, file, whether it was written, and msprobe's complaints.

    Raises:
        RlprobeError: msprobe or torch is not installed.
    """
    pt_compare = _msprobe()
    results: list[dict[str, Any]] = []
    for stage in plan:
        if stage.benchmark is not None and stage.target is not None:
            results += _stage_tables(pt_compare, stage, out / stage.stage, every_step, graph)
        else:
            _explain(out / stage.stage, NAME, "the stage is on one side only")
            if graph:
                graphs.explain(_graph(out / stage.stage, NAME), "the stage is on one side only")
    return results


def train_infer_plan(run: Side, engine: Side | None) -> list[StagePlan]:
    """msprobe's ``--consistent_check`` of one run's log-prob and generate stages."""
    inference, training = sources.sources(run, engine)
    # msprobe compares one file of each; call numbers of the two are paired in order
    one, other = inference.processes[0], training.processes[0]
    pairing = Pairing(other.step, other.rank, one, other)
    return [StagePlan(sources.NAME, inference, training, (pairing,))]


def _dump(file: Path) -> dict[str, Any]:
    try:
        whole = jsonfile.mapping(
            jsonfile.load(file, most=dumpjson.MAX_BYTES, nonfinite=True, depth=dumpjson.MAX_DEPTH)
        )
        if isinstance(whole.get("data"), dict):
            return whole
    except DocumentError as error:
        raise DumpError(f"{file}: {error}") from error
    raise DumpError(f"{file} is not an msprobe dump file: it has no mapping named data")


def _consistency(stage: StagePlan, copies: Sequence[Path]) -> dict[str, Any]:
    """msprobe's options for training against inference; none for any other stage.

    The copies become what msprobe can compare. Of tensors it could not: it joins query, key and
    value along the wrong axis, and fails where they differ in width. The module names of training
    become FSDP1's, as it matches nothing under any others.
    """
    if stage.stage != sources.NAME:
        return {}
    files = [copy / records.DUMP for copy in copies]
    engine, training = map(_dump, files)
    megatron = any(".decoder.layers." in name for name in training["data"])
    if not megatron and not any("_fsdp_wrapped_module." in name for name in training["data"]):
        training["data"] = {
            _LAYER.sub(r"\1_fsdp_wrapped_module.", name, count=1): entry
            for name, entry in training["data"].items()
        }
    for file, whole in zip(files, (engine, training), strict=True):
        whole |= {"task": "statistics", "data": _without_files(whole["data"])}
        file.write_text(json.dumps(whole), encoding="utf-8")
    return {"consistent_check": True, "backend": "megatron" if megatron else "fsdp"}


def _without_files(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _without_files(v) for k, v in node.items() if k != "data_name"}
    return [_without_files(child) for child in node] if isinstance(node, list) else node


def _msprobe() -> PtCompare:
    """msprobe's comparison of two files.

    Raises:
        RlprobeError: msprobe or torch is not installed.
    """
    try:
        # a false complaint about CANN
        with contextlib.redirect_stdout(io.StringIO()), imports.uncollected():
            from msprobe.pytorch.compare.pt_compare import pt_compare
    except ImportError as error:
        raise RlprobeError(
            f"official-table runs msprobe itself, which cannot be imported here ({error}); install "
            "mindstudio-probe and torch, or run this command in an image that has them. "
            "`rlprobe compare` needs neither"
        ) from error
    return pt_compare  # type: ignore[no-any-return]


def _stage_tables(
    pt_compare: PtCompare, stage: StagePlan, out: Path, every_step: bool, graph: bool
) -> Iterator[dict[str, Any]]:
    """Tables of one stage's process pairs; the first keeps the plain name."""
    pairs = [p for p in stage.pairings if p.benchmark is not None and p.target is not None]
    if not every_step:
        pairs = [p for p in pairs if p.step == pairs[0].step]
    for number, pairing in enumerate(pairs):
        with _laid_out(stage, pairing) as (benchmark, target):
            place = f"-step{pairing.step}-rank{pairing.rank}" if number else ""
            if graph:
                lacking = graphs.write(benchmark, target, _graph(out, f"{NAME}{place}"))
                if lacking:
                    _log.warning("%s: msprobe made no graph: %s", stage.stage, lacking)
            options = _consistency(stage, (benchmark, target))
            for file, suffix in ((records.DUMP, ""), (records.DEBUG, "-debug")):
                if not ((benchmark / file).is_file() and (target / file).is_file()):
                    continue
                message = _table(
                    pt_compare,
                    (benchmark / file, target / file),
                    out,
                    f"{NAME}{place}{suffix}",
                    options,
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
    if graph and not _graph(out, NAME).is_file():
        graphs.explain(_graph(out, NAME), "no process is on both sides")


def _graph(out: Path, name: str) -> Path:
    return out / f"{name}{graphs.SUFFIX}"


def _table(
    pt_compare: PtCompare,
    files: tuple[Path, Path],
    out: Path,
    name: str,
    options: dict[str, Any],
) -> str | None:
    """Both formats of one table; None, or why msprobe wrote none."""
    out.mkdir(parents=True, exist_ok=True)
    for kind in _KINDS:
        with tempfile.TemporaryDirectory() as aside:
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    pt_compare(
                        {"npu_path": str(files[1]), "bench_path": str(files[0])},
                        aside,
                        xlsx=kind == "xlsx",
                        **options,
                    )
            except Exception as error:  # noqa: BLE001 - whatever msprobe raises ends its table only
                return _explain(out, name, f"{complaints(said.getvalue())} ({error!r})")
            made = sorted(Path(aside).glob(f"*.{kind}"))
            if not made:
                return _explain(out, name, complaints(said.getvalue()))
            keep(made[0], out / f"{name}.{kind}")
    return None


def keep(made: Path, file: Path) -> None:
    """Put what msprobe wrote aside in its place, whole or not at all."""
    with written(file) as temporary:
        shutil.copyfile(made, temporary)


def _explain(out: Path, name: str, reason: str) -> str:
    """Files that say why there is no table, so that nobody takes a missing one for agreement."""
    out.mkdir(parents=True, exist_ok=True)
    text = reason.replace('"', "'")
    replace_text(out / f"{name}.csv", f'"{_NO_TABLE}"\n"{text}"\n')
    return explain_in(out / f"{name}.xlsx", text)


_NO_TABLE = "msprobe wrote no table"


def explain_in(file: Path, reason: str) -> str:
    """A workbook that says why msprobe wrote none; returns the reason."""
    from openpyxl import Workbook  # type: ignore[import-untyped]

    book = Workbook()
    for row in (_NO_TABLE, reason):
        book.active.append([row])
    with written(file) as temporary:
        book.save(temporary)
    return reason


def complaints(output: str) -> str:
    """What msprobe complained about in what it printed."""
    lines = [line for line in output.splitlines() if "[ERROR]" in line or "[WARNING]" in line]
    texts = dict.fromkeys(line.split("] ", 1)[-1].strip() for line in lines)
    return " ".join(texts) or "it said nothing"


def require_path(path: str) -> None:
    """Refuse a path that msprobe would refuse.

    Raises:
        RlprobeError: it has other characters than msprobe takes.
    """
    if not _ACCEPTED.match(path):
        raise RlprobeError(
            f"msprobe refuses the path {path}: set TMPDIR to one of letters, digits and _.:/-"
        )


@contextlib.contextmanager
def _laid_out(stage: StagePlan, pairing: Pairing) -> Iterator[tuple[Path, Path]]:
    """Both processes' files as plain files, in a place whose path msprobe accepts."""
    with tempfile.TemporaryDirectory(prefix="rlprobe-official-") as aside:
        require_path(aside)
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
        raise RlprobeError(f"{source.path}: the run has no dump tree; `rlprobe store verify` it")
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
