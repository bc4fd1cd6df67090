"""What a diagnosis is made from: ``RESULTS_DIR/alignment.json`` and what it leads to.

The workflow writes ``alignment.json`` when it plans an alignment (:func:`write` does the same by
hand)::

    {"format": 1, "name": …, "framework": …, "framework_version": …, "store": …, "coverage": 0.9,
     "runs": {role: {"key", "device", "precision", "stages", "imported"}},
     "pairs": {pair: {"benchmark": role, "target": role, "stages": [...]}},
     "digest": sha256 of the rest (:mod:`rlprobe.documents.seal`)}

Beside it stand ``compare/{pair}/{stage}/{records.parquet, summary.json}``; the runs are in the
store. What ``rlprobe compare A B -o OUT`` wrote of two dumps, ``OUT/{stage}/…``, is read as an
alignment without runs: what a manifest would say is not known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from rlprobe import stages
from rlprobe.documents import structfile
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.dumps import results as tables
from rlprobe.errors import DumpError, StoreError
from rlprobe.files import replace_bytes
from rlprobe.roles import BENCHMARK, TARGET

if TYPE_CHECKING:
    from rlprobe.compare.planner import StagePlan
    from rlprobe.store.read import Run

FORMAT = 1
NAME = "alignment.json"
_MAX_BYTES = 16 << 20
_AGAIN = "`rlprobe config plan CONFIG` writes it again"


class PlannedRun(msgspec.Struct, frozen=True):
    """A run as the alignment asked for it."""

    key: str
    device: str
    precision: str
    stages: list[str] = []
    imported: bool = False
    framework_version: str = ""


class PlannedPair(msgspec.Struct, frozen=True):
    """A comparison: the roles of the side compared against and of the side in question."""

    benchmark: str
    target: str
    stages: list[str] = []


class Plan(msgspec.Struct, frozen=True):
    """``alignment.json``."""

    name: str
    store: str
    runs: dict[str, PlannedRun]
    pairs: dict[str, PlannedPair]
    framework: str = ""
    framework_version: str = ""
    coverage: float = 0.9
    format: int = FORMAT

    @property
    def one_precision(self) -> bool:
        """Whether devices of one kind were asked for one precision: formats must then agree."""
        sides = [self.runs.get(role) for role in (BENCHMARK, TARGET)]
        asked = {(side.device, side.precision) for side in sides if side is not None}
        return None not in sides and len(asked) == 1


@dataclass(frozen=True)
class Results:
    """A results directory and the store behind it."""

    directory: Path
    plan: Plan
    store: Path
    #: A comparison of two dumps: no runs, and the stages stand in the directory itself.
    of_dumps: bool = False
    #: Runs by role, each opened once: what is read of them is checked once.
    _opened: dict[str, Run] = field(default_factory=dict, compare=False, repr=False)
    #: What of two dumps was compared with what, once it was looked up (:meth:`plans`).
    _plans: list[list[StagePlan]] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def open(cls, directory: Path) -> Results:
        """Read ``alignment.json``, or find what a comparison of two dumps left.

        Raises:
            DumpError: there is neither, or it is not what the workflow writes.
        """
        path = directory / NAME
        if not path.is_file() and (found := _compared_stages(directory)):
            return cls.of_comparison(directory, found)
        try:
            data = read_bytes(path, _MAX_BYTES)
        except DocumentError as error:
            raise DumpError(
                f"{path} {error}; `rlprobe config plan CONFIG` "
                "writes it. A comparison of two dumps needs none: there was no "
                f"{{stage}}/{tables.SUMMARY} in {directory} either"
            ) from error
        try:
            plan = structfile.parse(data, Plan, (FORMAT,), str(path), unmarked=FORMAT, again=_AGAIN)
        except DocumentError as error:
            raise DumpError(f"{path} is not an alignment's plan: {error}; {_AGAIN}") from error
        unknown = [s for p in plan.pairs.values() for s in p.stages if s not in stages.STAGES]
        if unknown:
            raise DumpError(f"{path}: stage {unknown[0]!r} is none")
        return cls(directory, plan, _store(plan, directory))

    @classmethod
    def of_comparison(cls, directory: Path, found: list[str]) -> Results:
        """What ``rlprobe compare -o DIRECTORY`` wrote of these stages, without runs."""
        pairs = {TARGET: PlannedPair(BENCHMARK, TARGET, found)}
        said = tables.sides(directory)
        plan = Plan(directory.resolve().name, "", {}, pairs)
        if said is not None:
            plan = msgspec.structs.replace(plan, coverage=said.coverage)
        return cls(directory, plan, directory, of_dumps=True)

    def run(self, role: str) -> Run | None:
        """A role's run, None where it is not planned or not in the store.

        Raises:
            StoreError: it is there and damaged.
        """
        if role in self._opened:
            return self._opened[role]
        planned = self.plan.runs.get(role)
        if planned is None or not (self.store / "runs" / planned.key / "manifest.json").is_file():
            return None
        # Imported here: a comparison of dumps has no runs, and their models load slowly.
        from rlprobe.store.read import Run

        return self._opened.setdefault(role, Run.open(self.store, planned.key))

    def plans(self) -> list[StagePlan]:
        """Of a comparison of dumps: what was compared with what, looked up once; else nothing.

        Raises:
            DumpError, StoreError, UsageError, NotComparableError: a side is gone, or is another.
        """
        said = tables.sides(self.directory) if self.of_dumps else None
        if said is None:
            return []
        if not self._plans:
            # Imported here: most results are of an alignment.
            from rlprobe.compare import planner, sides

            self._plans.append([])  # a failure is told once
            both = sides.resolve(said.benchmark), sides.resolve(said.target)
            self._plans[0] = planner.plan(*both, map_steps=said.map_steps)
        return self._plans[0]

    def compared(self, pair: str, stage: str) -> Path:
        """Where a comparison's files are, or would be."""
        if self.of_dumps and pair == TARGET:
            return self.directory / stage
        return self.directory / "compare" / pair / stage

    def stages(self, pair: str = TARGET) -> list[str]:
        """Stages that a pair should have been compared in, in the order of a step."""
        planned = self.plan.pairs.get(pair)
        if planned is None:
            return []
        return sorted(set(planned.stages), key=stages.order)

    def summary(self, pair: str, stage: str) -> tables.Summary | None:
        """``summary.json`` of a comparison; None where there is none.

        Raises:
            DumpError: it is damaged.
        """
        return tables.summary(self.compared(pair, stage))

    def table(self, pair: str, stage: str, name: str = tables.RECORDS) -> pl.LazyFrame | None:
        """A table of a comparison, as its summary vouches for it; None where it has none.

        Raises:
            DumpError: it is missing, damaged, or not the one that was written.
        """
        return tables.table(self.compared(pair, stage), name)


def _compared_stages(directory: Path) -> list[str]:
    """Stages that ``rlprobe compare`` left in a directory; names of any kind."""
    if not directory.is_dir():
        return []
    return sorted(
        p.parent.name
        for p in directory.glob(f"*/{tables.SUMMARY}")
        if p.is_file() and p.parent.name != "judged"
    )


def write(
    path: Path,
    *,
    name: str,
    store: str | os.PathLike[str],
    runs: Mapping[str, PlannedRun],
    pairs: Mapping[str, PlannedPair],
    coverage: float = 0.9,
    framework: str = "",
    framework_version: str = "",
) -> None:
    """Write ``alignment.json`` for runs and comparisons that no workflow made."""
    plan = Plan(
        name=name,
        store=os.fspath(store),
        runs=dict(runs),
        pairs=dict(pairs),
        framework=framework,
        framework_version=framework_version,
        coverage=coverage,
    )
    save(path, plan)


def _store(plan: Plan, directory: Path) -> Path:
    """The store of a plan, from whatever directory its results are read.

    A relative one is of the directory that the workflow ran in. That is this one, or one that the
    results are in: the first whose store has a run of the plan, and else the first that has one.
    """
    here = Path(plan.store)
    above = [place / here for place in (directory, *directory.resolve().parents)]
    places = [here] if here.is_absolute() else [here, *above]
    runs = [Path("runs", run.key, "manifest.json") for run in plan.runs.values()]
    holding = (place for place in places if any((place / run).is_file() for run in runs))
    return next(holding, next((place for place in places if place.is_dir()), here))


def save(path: Path, plan: Plan) -> None:
    """Write ``alignment.json``, whole or not at all."""
    replace_bytes(path, structfile.encoded(plan))


def require(results: Results, role: str) -> Run:
    """A role's run; of a comparison of dumps, a run of which nothing is known but the steps.

    Raises:
        StoreError: it is not in the store.
    """
    if results.of_dumps:
        return _unknown(results, role)
    run = results.run(role)
    if run is None:
        planned = results.plan.runs.get(role)
        raise StoreError(
            f"the {role} run {planned.key[:12] if planned else '(not planned)'} is not in "
            f"{results.store}; run `rlprobe run --role {role}` or import it"
        )
    return run


def _unknown(results: Results, role: str) -> Run:
    """What stands for a run of which there is a dump and nothing else."""
    from rlprobe.store.manifest import Manifest
    from rlprobe.store.read import Run

    summaries = [s for stage in results.stages() if (s := results.summary(TARGET, stage))]
    steps = sorted({int(step) for summary in summaries for step in summary.steps})
    said = tables.sides(results.directory)
    path = Path(getattr(said, role)) if said is not None else results.directory
    manifest = Manifest.model_construct(key="", role=role, declared={}, files=[], steps=steps)
    return Run(path, path, manifest)
