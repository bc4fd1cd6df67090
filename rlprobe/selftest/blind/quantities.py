"""What a target recorded, one entry a quantity, and the ways in which each can be wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.gate.contradictions import OF_TOKENS
from rlprobe.diagnose.run import Examined
from rlprobe.judge import extent, tables
from rlprobe.judge.curves import Curve
from rlprobe.judge.extent import Extents
from rlprobe.judge.keydata import LATER, result_of, stage_of
from rlprobe.judge.reasons import COPIED, LATER_STEP, MASKED_VALUE, TIMED
from rlprobe.store.read import Run

RECORD, KEY_DATA, METRIC, WEIGHT, PROOF, SETTING, BUFFER, TOKEN, CHOICE = (
    "record",
    "key_data",
    "metric",
    "weight",
    "proof",
    "setting",
    "buffer",
    "token",
    "choice",
)

#: Of what each process ran on, and of what the framework was told: another value, or none.
ENVIRONMENT, CONFIGURATION = "environment", "configuration"
#: What a process says that it loaded of another run's state.
JOINED = "joined"

TOLD = (ENVIRONMENT, CONFIGURATION, JOINED)

#: Where a gradient lies, a record by coordinates, what is noted of a call, a dump's own file, and
#: a file as a whole.
PLACE, COORDINATE, CALL, DUMP, TABLE = "place", "coordinate", "call", "dump", "table"
#: Where a process stands among others, which the manifest says.
LAYOUT = "layout"

#: Ten times its floor; NaN; zero; another dtype or shape; missing; a statistic that its digest
#: contradicts; one value of many.
#: Another place or order; one of several numbers that say it, missing.
TEN_FLOORS, NAN, ZERO, DTYPE, SHAPE, MISSING, CONTRADICTION, SINGLE, ELSEWHERE, PART = (
    "ten_floors",
    "nan",
    "zero",
    "dtype",
    "shape",
    "missing",
    "contradiction",
    "single",
    "elsewhere",
    "part",
)
#: Before the name of a parameter that an optimizer steps: it is there or missing.
STEPPED = "parameter "
#: The largest number that an additive mask says "never" with.
_NEVER = -1e4
WAYS: dict[str, tuple[str, ...]] = {
    RECORD: (TEN_FLOORS, NAN, ZERO, DTYPE, SHAPE, MISSING, CONTRADICTION, PART),
    KEY_DATA: (TEN_FLOORS, NAN, ZERO, DTYPE, MISSING, SINGLE, CONTRADICTION),
    METRIC: (TEN_FLOORS, NAN, ZERO, MISSING),
    WEIGHT: (TEN_FLOORS, NAN, ZERO, DTYPE, SHAPE, ELSEWHERE, MISSING, CONTRADICTION, PART),
    PROOF: (TEN_FLOORS, MISSING),
    SETTING: (TEN_FLOORS, NAN, ZERO, MISSING),
    BUFFER: (TEN_FLOORS, NAN, ZERO, DTYPE, SHAPE, MISSING, CONTRADICTION, PART),
    TOKEN: (TEN_FLOORS, NAN, ZERO, MISSING),
    CHOICE: (TEN_FLOORS, MISSING),
    ENVIRONMENT: (TEN_FLOORS, MISSING),
    CONFIGURATION: (TEN_FLOORS, MISSING),
    PLACE: (ELSEWHERE, SHAPE, DTYPE, MISSING),
    COORDINATE: (TEN_FLOORS, NAN, ZERO, DTYPE, SHAPE, ELSEWHERE, MISSING, CONTRADICTION),
    CALL: (TEN_FLOORS, MISSING),
    DUMP: (TEN_FLOORS, MISSING),
    TABLE: (MISSING,),
    LAYOUT: (TEN_FLOORS, MISSING),
    JOINED: (TEN_FLOORS, ZERO, MISSING),
}


@dataclass(frozen=True)
class Quantity:
    """One thing that the target recorded."""

    kind: str
    #: The stage that is judged anew when it changes; None for what belongs to all.
    stage: str | None
    #: The file of the run that holds it, relative to the run.
    file: str
    #: Row or line in the file; None where the file is one quantity.
    row: int | None
    #: What is sampled from each at least once: kind, stage, slot, micro-batch, step, rank.
    group: tuple[str, ...]
    name: str
    #: Relative, of a metric absolute; None where the baseline has none.
    floor: float | None
    #: Why the baseline says that it is not judged; None where it is.
    declared: str | None
    #: Step, rank and name of a record.
    record: tuple[int, int, str] | None = None
    #: Name of key data.
    key: str = ""


def of(judged: Examined) -> list[Quantity]:
    """Everything that the target recorded.

    Args:
        judged: a finished alignment whose verdict is "aligned".
    """
    found: list[Quantity] = []
    target, extents = judged.target, judged.extents
    for stage in judged.results.stages():
        captured = target.manifest.stages.get(stage)
        if captured is not None and captured.state == "captured":
            found += _records(judged.tables[stage], target, stage)
    found += _key_data(judged)
    found += _metrics(target, extents, judged.curves)
    found += _weights(target, extents)
    found += _proof(target, extents)
    found += _settings(target)
    found += _buffers(target, extents)
    floors = {one.record: one for one in found if one.kind == RECORD}
    for stage in judged.results.stages():
        found += _tokens(target, stage, floors)
        found += _choices(target, stage)
    return found


def _whole_step(extents: Extents, stage: str, step: int) -> str | None:
    """Why nothing of a stage's step is judged, where the diagnosis says that of all of it."""
    listed = extents.get(stage, {}).get(step)
    if listed is None or listed.judged or LATER_STEP not in listed.unjudged:
        return None
    return LATER_STEP


def _records(table: pl.DataFrame, target: Run, stage: str) -> Iterator[Quantity]:
    judged = table.filter(pl.col("slot") != tables.KEY_DATA)
    keys = ["step", "rank", "name"]
    known = judged.select(
        pl.col("step"),
        rank=pl.coalesce("rank_target", "rank"),
        name=pl.coalesce("name_target", "name"),
        floor="floor",
        declared=pl.when(~pl.col("judged").fill_null(False)).then(
            pl.coalesce("unjudged_because", "excused_by", pl.lit("unjudged"))
        ),
    ).unique(keys, keep="first")
    rows = pl.read_parquet(target.records(stage), glob=False).with_row_index("_row")
    joined = rows.select("_row", *keys, "slot", "direction", "call", says_never=_says_never()).join(
        known, on=keys, how="left", maintain_order="left"
    )
    for row in joined.iter_rows(named=True):
        group = (RECORD, stage, f"{row['slot']}/{row['direction']}", str(row["call"]),
                 str(row["step"]), str(row["rank"]))  # fmt: skip
        yield Quantity(
            RECORD, stage, f"records/{stage}.parquet", row["_row"], group,
            f"{row['name']} (step {row['step']}, rank {row['rank']})", row["floor"],
            row["declared"] or (MASKED_VALUE if row["says_never"] else None),
            (row["step"], row["rank"], row["name"]),
        )  # fmt: skip


def _says_never() -> pl.Expr:
    """Of an additive mask: what it says "never" with may be any such number."""
    mask = pl.col("index").str.contains("mask").fill_null(False)
    return mask & (pl.col("min") <= _NEVER).fill_null(False)


def _key_data(found: Examined) -> Iterator[Quantity]:
    declared: dict[tuple[str, int], str | None] = {}
    floors: dict[tuple[str, int], float | None] = {}
    passes: dict[str, int | None] = {}
    for stage, every in found.tables.items():
        table = every.filter(pl.col("slot") == tables.KEY_DATA)
        for name, step, judged, why, floor in table.select(
            "name", "step", "judged", "unjudged_because", "floor"
        ).iter_rows():
            declared[name, step] = None if judged else why
            if judged:
                floors[name, step] = floor
        finding = found.step.findings.get(stage)
        passes[stage] = None if finding is None else finding.stage.before_update
    for file in found.target.manifest.files:
        parts = Path(file.path).parts
        if parts[:2] != ("dump", "data") or not file.path.endswith(".npy"):
            continue
        name = parts[2]
        step = int(parts[3].removeprefix("step")) if parts[3].startswith("step") else 0
        stage = stage_of(name)
        micro = next((int(p[10:]) for p in parts if p.startswith("micro_step")), 0)
        early = passes.get(stage)
        late = early is not None and micro >= early and result_of(name) is not None
        called = name + LATER if late else name
        why = declared.get((called, step))
        group = (KEY_DATA, stage or "", name, str(micro), str(step), "")
        floor = floors.get((called, step))
        yield Quantity(KEY_DATA, stage, file.path, None, group, file.path, floor, why, key=name)


def _metrics(target: Run, extents: Extents, curves: Sequence[Curve]) -> Iterator[Quantity]:
    if not target.has("metrics.jsonl"):
        return
    widths = {
        (curve.metric, step): (high - low) / 2 for curve in curves for step, low, high in curve.band
    }
    for number, line in enumerate(target.metrics()):
        listed = extents.get(extent.TRAINER, {}).get(line.get("step", -1))
        declared = next(iter(listed.unjudged), None) if listed is not None else None
        step = line.get("step")
        for name in line.get("metrics") or {}:
            timed = None if extent.is_computed(name) else TIMED
            group = (METRIC, "", timed or name.partition("/")[0], "", str(step), "")
            width = widths.get((name, int(step or 0)))
            yield Quantity(
                METRIC, None, "metrics.jsonl", number, group, name, width,
                timed or (declared if width is None else None),
            )  # fmt: skip


def _weights(target: Run, extents: Extents) -> Iterator[Quantity]:
    table = target.weights()
    if table is None:
        return
    for number, row in enumerate(table.select("stage", "step", "rank", "name").iter_rows()):
        stage, step, rank, name = row
        group = (WEIGHT, stage, stages.MODEL_ROLE.get(stage, ""), "", str(step), str(rank))
        yield Quantity(
            WEIGHT,
            None,
            "weights.parquet",
            number,
            group,
            f"{name} ({stage})",
            None,
            _whole_step(extents, stage, step),
        )


def _proof(target: Run, extents: Extents) -> Iterator[Quantity]:
    for number, entry in enumerate(target.mock_proof() or []):
        group = (PROOF, entry["stage"], "", "", str(entry["step"]), str(entry["rank"]))
        name = f"samples of {entry['stage']}, step {entry['step']}, rank {entry['rank']}"
        declared = _whole_step(extents, entry["stage"], entry["step"])
        yield Quantity(PROOF, None, "mock_proof.json", number, group, name, None, declared)


def _settings(target: Run) -> Iterator[Quantity]:
    """What optimizers were told, and of which parameters; ``key`` is the group's number and the
    setting's name, or :data:`STEPPED` and the parameter's."""
    for number, line in enumerate(target.optimizers()):
        stage, step, update = line["stage"], line["step"], line["update"]
        for place, group in enumerate(line["groups"]):
            for key in [*group["settings"], *(f"{STEPPED}{name}" for name in group["names"])]:
                kind = STEPPED if key.startswith(STEPPED) else key
                yield Quantity(
                    SETTING, None, "optimizers.json", number,
                    (SETTING, stage, kind, str(update), str(step), str(line["ranks"])),
                    f"{key} of group {place} ({stage}, step {step}, update {update})", None, None,
                    key=f"{place}/{key}",
                )  # fmt: skip


def _buffers(target: Run, extents: Extents) -> Iterator[Quantity]:
    """What modules keep beside their parameters; ``key`` is its name."""
    for number, line in enumerate(target.buffers()):
        stage, step, role = line["stage"], line["step"], line["role"]
        for kept in line["buffers"]:
            group = (BUFFER, stage, role, kept["name"], str(step), str(line["ranks"]))
            name = f"{kept['name']} ({role}, {stage}, step {step})"
            declared = _whole_step(extents, stage, step)
            yield Quantity(
                BUFFER, None, "buffers.json", number, group, name, None, declared, key=kept["name"]
            )


def _tokens(
    target: Run, stage: str, records: Mapping[tuple[int, int, str] | None, Quantity]
) -> Iterator[Quantity]:
    """The first, middle and last token of every call whose tokens are sketched: there are
    thousands, and all of one call are held against the same.

    Args:
        target: the run.
        stage: canonical name.
        records: by step, rank and name.
    """
    table = target.token_sketches(stage)
    if table is None:
        return
    calls: dict[tuple[Any, ...], list[int]] = {}
    keys = ("step", "rank", "name", "micro_step")
    for number, key in enumerate(table.select(keys).iter_rows()):
        calls.setdefault(key, []).append(number)
    for (step, rank, name, micro), rows in calls.items():
        record = records.get((step, rank, name))
        group = (TOKEN, stage, name, str(micro), str(step), str(rank))
        floor = OF_TOKENS * ((record and record.floor) or 0.0)
        # what no record is of are a router's choices, of which there is a table
        declared = COPIED if record is None else record.declared
        for number in dict.fromkeys((rows[0], rows[len(rows) // 2], rows[-1])):
            yield Quantity(
                TOKEN, stage, f"token_sketches/{stage}.parquet", number, group,
                f"token {number - rows[0]} of {name} (step {step}, rank {rank})", floor,
                declared,
            )  # fmt: skip


def _choices(target: Run, stage: str) -> Iterator[Quantity]:
    """The experts of the first, middle and last token of every router."""
    table = target.routing(stage)
    if table is None:
        return
    routers: dict[tuple[Any, ...], list[int]] = {}
    for number, key in enumerate(table.select("step", "rank", "module").iter_rows()):
        routers.setdefault(key, []).append(number)
    for (step, rank, module), rows in routers.items():
        group = (CHOICE, stage, module, "", str(step), str(rank))
        for number in dict.fromkeys((rows[0], rows[len(rows) // 2], rows[-1])):
            yield Quantity(
                CHOICE, None, f"routing/{stage}.parquet", number, group,
                f"choice {number - rows[0]} of {module} ({stage}, step {step}, rank {rank})",
                None, None,
            )  # fmt: skip


def is_below(quantity: Quantity, way: str) -> bool:
    """Whether a disturbance is within the floor: zero for what is no larger than its round-off."""
    return way == ZERO and quantity.floor is not None and quantity.floor >= 1.0


def sample(found: Sequence[Quantity], count: int | None, seed: int) -> list[tuple[Quantity, str]]:
    """Quantities and ways to disturb them: each group and way once, then others at random.

    Args:
        found: of :func:`of`.
        count: how many; fewer than there are groups and ways leaves some of them out. None: all.
        seed: the same gives the same.
    """
    if count is None:
        return [(one, way) for one in found for way in WAYS[one.kind]]
    chance = random.Random(seed)
    groups: dict[tuple[str, ...], list[Quantity]] = {}
    for quantity in found:
        groups.setdefault(quantity.group, []).append(quantity)
    first = [
        (chance.choice(members), way)
        for members in groups.values()
        for way in WAYS[members[0].kind]
    ]
    chance.shuffle(first)
    if len(first) >= count:
        return first[:count]
    chosen = set(first)
    rest = [(one, way) for one in found for way in WAYS[one.kind] if (one, way) not in chosen]
    return first + chance.sample(rest, min(count - len(first), len(rest)))
