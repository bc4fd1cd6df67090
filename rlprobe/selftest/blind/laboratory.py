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
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
from msgspec import structs

from rlprobe import stages
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.samples.run import Samples
from rlprobe.compare.stage_sources import RunStage
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.run import Examined, examine
from rlprobe.dumps import results as tables
from rlprobe.dumps.key_data import KeyData
from rlprobe.errors import NotComparableError, RlprobeError, UsageError
from rlprobe.judge import analysis, propagated
from rlprobe.judge.curves import LEFT, Curve
from rlprobe.judge.extent import Extents
from rlprobe.judge.inputs import NAME as PLAN
from rlprobe.judge.inputs import Results, save
from rlprobe.judge.judge import Kept, key_data
from rlprobe.judge.keydata import LATER, Difference
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.selftest.blind import beside, disturb, told
from rlprobe.selftest.blind.quantities import (
    CALL,
    COORDINATE,
    DUMP,
    ELSEWHERE,
    LAYOUT,
    METRIC,
    MISSING,
    PLACE,
    RECORD,
    SETTING,
    SHAPE,
    TOKEN,
    TOLD,
    WEIGHT,
    Quantity,
)
from rlprobe.selftest.blind.remembered import (
    REMEMBERED,
    Compared,
    Touched,
    made_of,
    of_one_key,
    remember,
    remember_rows,
)
from rlprobe.store.manifest import NAME as MANIFEST
from rlprobe.store.manifest import File, Manifest
from rlprobe.store.read import Run

#: Kinds on which key data do not depend.
_APART = (RECORD, TOKEN, METRIC, SETTING, PLACE, COORDINATE, CALL, DUMP, *TOLD)


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
    #: By reason, how much was said to be held against nothing.
    unheld: Mapping[str, int] = field(default_factory=dict)


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
        found = Results.open(self.results)
        self._opened = Compared(found.directory, found.plan, found.store)
        for role in self._opened.plan.runs:
            run = self._opened.run(role)
            if run is not None:
                remember(run)
        self._kept = Kept()
        self._left, self._right = sides.both(str(self._benchmark), str(self.target))
        self._samples = Samples(self._benchmark, self.target, opened=self._key_data())
        vars(self._samples)["compare"] = functools.cache(self._samples.compare)
        self.before = self._judgement(examine(self._opened, self._kept))

    def _key_data(self) -> tuple[KeyData | None, KeyData | None]:
        """Of both sides, as they were opened."""
        runs = (self._opened.run(role) for role in (BENCHMARK, TARGET))
        left, right = (None if run is None else run.recorded for run in runs)
        return left, right

    def _of_no_run(self) -> None:
        """Comparisons that do not say whose they are: only the stage that is touched is compared
        anew, and the others are of the run as it was."""
        for path in self.results.glob(f"compare/*/*/{tables.SUMMARY}"):
            said = tables.document(path.parent) or {}
            self._replace(path, tables.sealed(said | {"of": {}}).encode())

    @property
    def _has_shards(self) -> bool:
        runs = [self._opened.run(role) for role in (BENCHMARK, TARGET)]
        sizes = [process.world_size for run in runs if run for process in run.manifest.layout]
        return max(sizes, default=1) > 1

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
                if whole:
                    self._compare(quantity.stage, None)
                    return self._judged(Results.open(self.results), Kept())
                results = self._with_target(quantity)
                self._compare(quantity.stage, self._samples_of(quantity, results))
                return self._judged(results, self._untouched(quantity, way, results))
            except RlprobeError as error:
                return str(error)

    def _with_target(self, quantity: Quantity) -> Compared:
        """The alignment with the target as it is now, and the other runs as they were opened."""
        was = self._opened.run(TARGET)
        assert was is not None
        target = Run(was.store, was.path, Manifest.load(self.target))
        kept = {name: vars(was)[name] for name in REMEMBERED - made_of(quantity)}
        if quantity.kind in _APART:  # its key data are what they were
            kept |= {name: getattr(was, name) for name in ("_checked_data", "recorded")}
            vars(target).update(kept)
        else:
            kept |= {n: functools.cache(getattr(target, n)) for n in REMEMBERED - kept.keys()}
            vars(target).update(kept)
            remember_rows(target)
        if of_one_key(quantity) and target.recorded is not None and was.recorded is not None:
            vars(target)["recorded"] = Touched(target.recorded, was.recorded, quantity.key)
        runs = {role: run for role in self._opened.plan.runs
                if (run := self._opened.run(role)) is not None}  # fmt: skip
        return dataclasses.replace(
            self._opened, _opened=runs | {TARGET: target}, changed=quantity.stage
        )

    def _samples_of(self, quantity: Quantity, results: Results) -> Samples | None:
        """Key data of both sides as comparing reads them; None where they are read anew."""
        target = results.run(TARGET)
        if quantity.kind in (RECORD, CALL, PLACE, COORDINATE):
            return self._samples
        if quantity.kind == TOKEN:
            return Samples(self._benchmark, self.target, opened=self._key_data())
        if not of_one_key(quantity) or target is None:
            return None
        opened = self._key_data()[0], target.recorded
        return Samples(self._benchmark, self.target, opened=opened)

    def _untouched(self, quantity: Quantity, way: str, results: Results) -> Kept:
        """What does not depend on a quantity: of a record all but its stage, of a stage's key data
        all but that and what is made of it, of tokens, samples and weights nothing."""
        if quantity.kind == WEIGHT and way in (SHAPE, ELSEWHERE):
            return Kept()  # gradients are joined by where weights lie
        one_key = of_one_key(quantity)
        # weights tell how shards of records lie, of which one process has none
        of_gate = (METRIC, SETTING) if self._has_shards else (METRIC, SETTING, WEIGHT)
        kept = quantity.kind in (*_APART, *of_gate)
        if not one_key and (not kept or told.of_floors(quantity)):
            return Kept()
        touched = {quantity.stage}
        if one_key and quantity.key in propagated.NAMES:
            touched |= stages.UPDATE_STAGES
        left = {at: found for at, found in self._kept.stages.items() if at[0] not in touched}
        if not one_key:
            return Kept(left, dict(self._kept.key_data), dict(self._kept.findings))
        return Kept(left, self._key_data_with(quantity.key, results))

    def _key_data_with(
        self, key: str, results: Results
    ) -> dict[tuple[int, tuple[tuple[str, int | None], ...]], dict[str, Difference]]:
        """Differences of key data, of which those of one key are found anew."""
        found = {}
        for (step, passes), every in self._kept.key_data.items():
            new = key_data(results, step, dict(passes), {key})
            rest = {n: d for n, d in every.items() if n.removesuffix(LATER) != key}
            found[step, passes] = dict(sorted((rest | new).items()))
        return found

    def _judged(self, results: Results, kept: Kept) -> Judgement | str:
        try:
            return self._judgement(examine(results, kept))
        except RlprobeError as error:
            return str(error)

    def _judgement(self, found: Examined) -> Judgement:
        self._last = found
        return Judgement(found.verdict, found.gate.items, found.extents, _why(found), found.unheld)

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
        if compared is not None:  # nothing is written through a link: whatever is new is a new file
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
        captured = dict(self._manifest.stages)
        if quantity.kind == RECORD and way == MISSING and quantity.stage is not None:
            one = captured[quantity.stage]
            captured[quantity.stage] = one.model_copy(update={"records": one.records - 1})
        layout = list(self._manifest.layout)
        if quantity.kind == LAYOUT:
            layout = beside.laid_out(layout, quantity, way)
        changed = self._manifest.model_copy(
            update={"files": files, "stages": captured, "layout": layout}
        )
        self._replace(self.target / MANIFEST, changed.to_bytes())

    def _compare(self, stage: str | None, samples: Samples | None) -> None:
        """Compare a stage anew.

        Args:
            stage: canonical name; None: no comparison is touched.
            samples: key data of both sides; None: read anew.
        """
        if stage is None:
            return
        right = self._right_of(stage) if samples is not None else sides.resolve(str(self.target))
        out = self.results / "compare" / TARGET
        aside = self.results.parent / "again"
        shutil.rmtree(aside, ignore_errors=True)
        options = Options(TARGET, (stage,), self._found.plan.coverage, samples=samples)
        with contextlib.suppress(NotComparableError):  # it has written what there was to say
            compare(self._left, right, aside, options)
        shutil.rmtree(out / stage, ignore_errors=True)
        (aside / stage).rename(out / stage)

    def _right_of(self, stage: str) -> sides.Side:
        """The target, of which one stage may be another than it was."""
        table = self._right.stages.get(stage)
        if not isinstance(table, RunStage):
            return self._right
        fresh = sides.stage_of_run(self.target, table.path)
        return dataclasses.replace(self._right, stages={**self._right.stages, stage: fresh})

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        # another file in the same place: the one that is linked elsewhere stays as it is
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def _why(found: Examined) -> str:
    """Where the records part first, or which metric leaves."""
    first = analysis.first_of(found.step)
    if first is not None and first.origin is not None:
        return f"{first.stage.name}: {first.origin.reason}"
    return next((_left(curve) for curve in found.curves if curve.verdict == LEFT), "")


def _left(curve: Curve) -> str:
    return f"{curve.metric} leaves at step {curve.step}"
