"""What a target recorded besides, and that is held against nothing: how much, by reason.

The list is closed (:data:`rlprobe.judge.reasons.UNHELD`) and stands in ``diagnosis.json``, so that
whoever reads "aligned" can see what it does not say anything of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from rlprobe.diagnose.gate import configuration
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps.construct import NAME as CONSTRUCT
from rlprobe.dumps.records import DEBUG, DUMP, STACK
from rlprobe.errors import StoreError
from rlprobe.judge.extent import is_computed
from rlprobe.judge.reasons import COPIED, HARMLESS, INTENDED, SHOWN, TIMED, UNHELD, UNIMPORTED
from rlprobe.store.read import Run

CONFIGURATION = "dump/configurations.json"
#: Parts of a process's environment that are held against the other side's; all others are intended.
JUDGED = frozenset({"versions", "code", "switches", "dropout"})
_MAX_BYTES = 64 << 20
#: Part of it whose entries are held only where both sides have them.
CODE = "code"
#: Files of a process's dump that are in the record tables, or shown beside them.
_COPIES = frozenset({DUMP, DEBUG, CONSTRUCT, STACK})


def of(run: Run) -> dict[str, int]:
    """How many things a run recorded of each reason; those of which it has none are left out.

    Raises:
        StoreError: a file is damaged.
    """
    counted: Counter[str] = Counter()
    for process in run.environment().values():
        for path in leaves(process):
            reason = INTENDED if path[0] not in JUDGED else UNIMPORTED
            counted[reason] += path[0] not in JUDGED or path[0] == CODE
    counted[HARMLESS] = sum(map(is_harmless, leaves(configurations(run))))
    counted[SHOWN] = sum(stage.records for stage in run.manifest.stages.values())
    counted[COPIED] = sum(1 for _ in copies(run)) + _summaries(run)
    counted[TIMED] = sum(
        not is_computed(str(name)) for line in run.metrics() for name in line.get("metrics") or {}
    )
    return {reason: counted[reason] for reason in UNHELD if counted[reason]}


def configurations(run: Run) -> dict[str, Any]:
    """What its framework was told; empty where it did not say."""
    if not run.has(CONFIGURATION):
        return {}
    try:
        return jsonfile.mapping(
            jsonfile.load(run.checked(CONFIGURATION), most=_MAX_BYTES, nonfinite=True)
        )
    except DocumentError as error:
        raise StoreError(f"{run.path / CONFIGURATION} is damaged: {error}") from error


def is_harmless(path: list[str]) -> bool:
    """Whether a setting, by the keys that lead to it, cannot change what is computed."""
    return configuration.kind(".".join(path)) == "harmless"


def copies(run: Run) -> Iterator[str]:
    """Files of its dump that are not judged, as its tables are."""
    for file in run.manifest.files:
        path = PurePosixPath(file.path)
        if path.parts[:1] == ("dump",) and path.name in _COPIES and path.parts[1:2] != ("data",):
            yield file.path


def _summaries(run: Run) -> int:
    """What its manifest says at a glance of tables that are judged themselves."""
    recorded = run.manifest.recorded
    ranks = sum(bool(stage.ranks) for stage in run.manifest.stages.values())
    return len(recorded.weights) + len(recorded.samples) + len(recorded.rollouts) + ranks


def leaves(value: Mapping[str, Any], *before: str) -> Iterator[list[str]]:
    """The keys that lead to each value that is no mapping, or an empty one."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from leaves(inner, *before, key)
        else:
            yield [*before, key]
