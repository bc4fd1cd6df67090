"""A copy of a finished alignment in which one quantity at a time is disturbed and judged again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from msgspec import structs

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.run import Examined, examine
from rlprobe.dumps import results as tables
from rlprobe.errors import NotComparableError, RlprobeError, UsageError
from rlprobe.judge import analysis
from rlprobe.judge.curves import LEFT, Curve
from rlprobe.judge.extent import Extents
from rlprobe.judge.inputs import NAME as PLAN
from rlprobe.judge.inputs import Results, save
from rlprobe.judge.judge import Kept
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.selftest.blind import disturb
from rlprobe.selftest.blind.quantities import METRIC, MISSING, RECORD, Quantity
from rlprobe.store.manifest import NAME as MANIFEST
from rlprobe.store.manifest import File, Manifest
from rlprobe.store.read import Run


def _link(source: str, target: str) -> None:
    """Share a file; copy it where the file system does not link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass(frozen=True)
class Judgement:
    """What a judgement says, without where and why."""

    verdict: str
    gate: list[GateItem]
    extent: Extents
    #: What made the verdict, in a few words.
    why: str = ""


class Laboratory:
    """Judges an alignment again after its target was changed.

    Nothing is trained, and only what was touched is compared and judged anew: what was found of
    everything else is kept. Files are shared with the alignment by hard link and never written
    through one.
    """

    def __init__(self, results: Path, directory: Path) -> None:
        """
        Args:
            results: a finished alignment.
            directory: where the copy goes; made, and emptied first.
        """
        self._found = Results.open(results)
        shutil.rmtree(directory, ignore_errors=True)
        self.results = directory / "results"
        self._store = directory / "store"
        (self._store / "runs").mkdir(parents=True)
        shutil.copytree(results, self.results, copy_function=_link)
        for role, planned in self._found.plan.runs.items():
            run = self._found.run(role)
            if run is None:
                continue
            shutil.copytree(run.path, self._store / "runs" / planned.key, copy_function=_link,
                            dirs_exist_ok=True)  # fmt: skip
        plan = self._found.plan
        # a new file in place of the link
        save(self.results / PLAN, structs.replace(plan, store=str(self._store.resolve())))
        keys = plan.runs
        self._benchmark, self.target = (
            self._store / "runs" / keys[role].key for role in (BENCHMARK, TARGET)
        )
        self._manifest = Manifest.load(self.target)
        self._of_no_run()
        self._opened = Results.open(self.results)
        for role in self._opened.plan.runs:
            run = self._opened.run(role)
            if run is not None:
                _remember(run)
        self._kept = Kept()
        self.before = self._judgement(examine(self._opened, self._kept))

    def _of_no_run(self) -> None:
        """Comparisons that do not say whose they are: only the stage that is touched is compared
        anew, and the others are of the run as it was."""
        for path in self.results.glob(f"compare/*/*/{tables.SUMMARY}"):
            said = tables.summary(path.parent) or {}
            self._replace(path, tables.sealed(said | {"of": {}}).encode())

    @property
    def examined(self) -> Examined:
        """The copy as it stands."""
        return examine(self._opened, self._kept)

    def judged_whole(self) -> Judgement | str:
        """The copy as it stands, everything of it read and judged anew; or the error that it ends
        in."""
        return self._judged(Results.open(self.results), Kept())

    def require_neutral(self) -> None:
        """Make sure that it is the disturbance that is noticed, and not that the copy was touched.

        Raises:
            UsageError: it is judged otherwise once nothing but a note in its manifest has changed.
        """
        noted = {**self._manifest.volatile, "blind": True}
        touched = self._manifest.model_copy(update={"volatile": noted})
        self._replace(self.target / MANIFEST, touched.to_bytes())
        try:
            after = self.judged_whole()
        finally:
            self._replace(self.target / MANIFEST, self._manifest.to_bytes())
        if isinstance(after, str):
            raise UsageError(f"a copy of {self._found.directory} is not judged: {after}")
        if after != self.before:
            raise UsageError(
                f"a copy of {self._found.directory} is judged otherwise where nothing that was "
                "recorded has changed: no disturbance would tell"
            )

    def with_disturbed(
        self, quantity: Quantity, way: str, *, whole: bool = False
    ) -> Judgement | str:
        """What is said with one quantity disturbed, or the error that it ended in.

        Args:
            quantity: what is disturbed.
            way: how.
            whole: judge everything anew, and not only what was touched.

        Raises:
            UnchangedError: the disturbance changes nothing.
        """
        contents = disturb.contents(self.target, quantity, way)
        with self._changed(quantity, way, contents):
            try:
                if quantity.stage is not None:
                    self._compare(quantity.stage)
                if whole:
                    return self._judged(Results.open(self.results), Kept())
                return self._judged(self._with_target(quantity), self._untouched(quantity))
            except RlprobeError as error:
                return str(error)

    def _with_target(self, quantity: Quantity) -> Results:
        """The alignment with the target as it is now, and the other runs as they were opened."""
        was = self._opened.run(TARGET)
        assert was is not None
        target = Run(was.store, was.path, Manifest.load(self.target))
        if quantity.kind in (RECORD, METRIC):  # its key data and weights are what they were
            vars(target).update(
                {name: getattr(was, name) for name in ("_checked_data", "recorded", "weights")}
            )
        else:
            _remember(target)
        runs = {role: run for role in self._opened.plan.runs
                if (run := self._opened.run(role)) is not None}  # fmt: skip
        return dataclasses.replace(self._opened, _opened=runs | {TARGET: target})

    def _untouched(self, quantity: Quantity) -> Kept:
        """What does not depend on a quantity: of a record all but its stage, of key data, samples
        and weights nothing."""
        if quantity.kind not in (RECORD, METRIC):
            return Kept()
        stages = {at: found for at, found in self._kept.stages.items() if at[0] != quantity.stage}
        return Kept(stages, dict(self._kept.key_data), dict(self._kept.findings))

    def _judged(self, results: Results, kept: Kept) -> Judgement | str:
        try:
            return self._judgement(examine(results, kept))
        except RlprobeError as error:
            return str(error)

    def _judgement(self, found: Examined) -> Judgement:
        self._last = found
        return Judgement(found.verdict, found.gate.items, found.extents, _why(found))

    def floor(self, quantity: Quantity) -> float | None:
        """A record's floor in what was judged last; None where it has none.

        What was equal on both sides is held against more once it differs.
        """
        if quantity.record is None or quantity.stage is None:
            return None
        step, rank, name = quantity.record
        table = self._last.tables[quantity.stage].filter(
            (pl.col("step") == step)
            & (pl.coalesce("rank_target", "rank") == rank)
            & (pl.coalesce("name_target", "name") == name)
        )
        found = table.get_column("floor").max()
        return float(found) if isinstance(found, float) else None

    @contextmanager
    def _changed(
        self, quantity: Quantity, way: str, contents: Mapping[str, bytes | None]
    ) -> Iterator[None]:
        kept = {name: (self.target / name).read_bytes() for name in contents}
        stage = quantity.stage
        compared = self.results / "compare" / TARGET / stage if stage is not None else None
        aside = self.results.parent / "compared"
        if compared is not None:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(compared, aside, copy_function=_link)
        self._describe(quantity, way, contents)
        for name, data in contents.items():
            if data is None:
                (self.target / name).unlink()
            else:
                self._replace(self.target / name, data)
        try:
            yield
        finally:
            for name, data in kept.items():
                self._replace(self.target / name, data)
            self._replace(self.target / MANIFEST, self._manifest.to_bytes())
            if compared is not None:
                shutil.rmtree(compared, ignore_errors=True)
                aside.rename(compared)

    def _describe(self, quantity: Quantity, way: str, contents: Mapping[str, bytes | None]) -> None:
        """A manifest as the target would have had, had it recorded this."""
        files = [file for file in self._manifest.files if file.path not in contents]
        files += [
            File(path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            for name, data in contents.items()
            if data is not None
        ]
        files.sort(key=lambda file: file.path)
        stages = dict(self._manifest.stages)
        if quantity.kind == RECORD and way == MISSING and quantity.stage is not None:
            one = stages[quantity.stage]
            stages[quantity.stage] = one.model_copy(update={"records": one.records - 1})
        changed = self._manifest.model_copy(update={"files": files, "stages": stages})
        self._replace(self.target / MANIFEST, changed.to_bytes())

    def _compare(self, stage: str) -> None:
        left, right = (sides.resolve(str(run), None) for run in (self._benchmark, self.target))
        out = self.results / "compare" / TARGET
        aside = self.results.parent / "again"
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(NotComparableError):  # it has written what there was to say
            compare(left, right, aside, Options(TARGET, (stage,), self._found.plan.coverage))
        shutil.rmtree(out / stage, ignore_errors=True)
        (aside / stage).rename(out / stage)

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        # another file in the same place: the one that is linked elsewhere stays as it is
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def _remember(run: Run) -> None:
    """Read once what judging asks a run for many times."""
    vars(run)["weights"] = functools.cache(run.weights)
    if run.recorded is not None:
        vars(run.recorded)["rows"] = functools.cache(run.recorded.rows)


def _why(found: Examined) -> str:
    """Where the records part first, or which metric leaves."""
    first = analysis.first_of(found.step)
    if first is not None and first.origin is not None:
        return f"{first.stage.name}: {first.origin.reason}"
    return next((_left(curve) for curve in found.curves if curve.verdict == LEFT), "")


def _left(curve: Curve) -> str:
    return f"{curve.metric} leaves at step {curve.step}"
