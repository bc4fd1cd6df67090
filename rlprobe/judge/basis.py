"""What an answer rests on: the digests of the files that it was made from.

A diagnosis names them, so that one that was left from other comparisons, or copied from another
directory, is not taken for the answer to these. A comparison's summary names the runs that it
compared and their manifests' digests, so that neither is one of other runs, or of runs that were
made again since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from rlprobe import files
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.dumps import results as tables
from rlprobe.errors import DumpError
from rlprobe.judge.inputs import NAME, Results
from rlprobe.roles import TARGET

_MANIFEST = "manifest.json"
_MAX_BYTES = 256 << 20


def of(results: Results) -> dict[str, str]:
    """Path below the results -> sha256: the plan, and of every comparison its summary and sides.

    Raises:
        DumpError: a comparison is of other runs than the plan names, or a file cannot be read.
    """
    paths = [results.directory / NAME]
    for pair in [TARGET] if results.of_dumps else sorted(results.plan.pairs):
        directory = results.compared(pair, "any").parent
        tables.sides(directory)  # what it says is read, and refused where it is damaged
        paths.append(directory / tables.SIDES)
        for stage in results.stages(pair):
            _require_planned(results, pair, stage)
            paths.append(results.compared(pair, stage) / tables.SUMMARY)
    found = {}
    for path in paths:
        if path.is_file():
            found[path.relative_to(results.directory).as_posix()] = _sha256(path)
    return found


def check(directory: Path, named: Mapping[str, str], answer: Path, again: str) -> None:
    """Make sure that an answer rests on the files that are there now.

    An answer without any of them, as one that was copied elsewhere by itself, stands by itself.

    Args:
        directory: of the results.
        named: what the answer says that it was made from, as :func:`of` gives it.
        answer: its file, for messages.
        again: how to make it again, for messages.

    Raises:
        DumpError: one of the files is missing or another, or a table that one of them names is.
    """
    there = {name for name in named if (directory / name).is_file()}
    if not there:
        return
    for name in sorted(named):
        path = directory / name
        if name not in there:
            raise DumpError(f"{answer} was made from {path}, which is missing; {again}")
        if _sha256(path) != named[name]:
            raise DumpError(
                f"{answer} was made from another {path}: it is the answer to other comparisons, or "
                f"that file was changed since; {again}"
            )
        if path.name == tables.SUMMARY:
            tables.require_there(path.parent)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(path, _MAX_BYTES)).hexdigest()
    except DocumentError as error:
        raise DumpError(f"{path} {error}") from error


def _require_planned(results: Results, pair: str, stage: str) -> None:
    """Make sure that a comparison is of the planned runs, as they are now.

    Nothing is known of one that was made by an earlier version, and of runs that are not here.
    """
    said = results.summary(pair, stage)
    if said is None or results.of_dumps:
        return
    roles = results.plan.pairs[pair]
    where = results.compared(pair, stage)
    for side, role in (("benchmark", roles.benchmark), ("target", roles.target)):
        known = said.of.get(side)
        planned = results.plan.runs.get(role)
        if known is None or planned is None:
            continue
        if known.key != planned.key:
            raise DumpError(
                f"{where} compares run {str(known.key)[:12]} as its {side}, {NAME} names "
                f"{planned.key[:12]}; compare the runs of this alignment"
            )
        manifest = results.store / "runs" / planned.key / _MANIFEST
        if manifest.is_file() and files.digest(manifest).sha256 != known.manifest:
            raise DumpError(
                f"{where} compares run {planned.key[:12]} ({role}) as it was: the one in "
                f"{results.store} was made again or changed since; compare again"
            )
