"""Key data and token sketches of one stage, where both sides have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe import stages
from rlprobe.compare import planner
from rlprobe.compare.samples import joining, sketches
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import read_bytes
from rlprobe.dumps import proof
from rlprobe.dumps.key_data import BatchKey, KeyData, MicroBatch
from rlprobe.dumps.key_names import stage_of
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.dumps.results import KEY_DATA, TOKEN_SKETCHES
from rlprobe.errors import DumpError, StoreError
from rlprobe.said import Said
from rlprobe.sketch import CHOSEN
from rlprobe.store import listing
from rlprobe.terminal import counted

#: Largest proof that is read: a line per process, step and stage, 70 bytes a sample.
_MAX_PROOF = 512 << 20
#: Names of files that a note lists.
_SHOWN = 3


def data_directory(side: Path) -> Path | None:
    """Where a run, a scratch space or a dump tree keeps its key data; None where it has none."""
    return next((p for p in (side / "data", side / "dump" / "data") if p.is_dir()), None)


def open_side(side: Path) -> KeyData | None:
    """The key data of a run, a scratch space or a dump tree.

    Raises:
        StoreError: its mock proof is damaged.
    """
    if (side / listing.MANIFEST).is_file():
        data = listing.checked_below(side, "dump/data")
    else:
        data = data_directory(side)
    return None if data is None else KeyData(data, _proof(side))


@dataclass(frozen=True)
class Compared:
    """What was found of one stage's samples."""

    #: For summary.json.
    summary: dict[str, Any]
    #: Tables to be written, by file name; none of them is empty.
    tables: dict[str, pl.DataFrame]


class Samples:
    """Both sides' key data, read once for all stages.

    Args:
        benchmark, target: a run, a scratch space or a dump tree.
        map_steps: the target's step for steps of the benchmark, see :func:`planner.plan`.
        opened: key data of both where they have been opened already.
    """

    def __init__(
        self,
        benchmark: Path,
        target: Path,
        map_steps: Mapping[int, int] | None = None,
        opened: tuple[KeyData | None, KeyData | None] | None = None,
    ) -> None:
        self._paths = benchmark, target
        self._map_steps = map_steps or {}
        self._sides = opened or (open_side(benchmark), open_side(target))

    @property
    def lone(self) -> str | None:
        """The side that alone has key data; None where both have some, or neither has."""
        have = [side is not None for side in self._sides]
        return None if have[0] == have[1] else "benchmark" if have[0] else "target"

    def stages(self) -> list[str]:
        """Stages of which both sides have key data, in the order of a step."""
        both = [
            set() if side is None else {stage_of(key) for key in side.keys()}  # noqa: SIM118
            for side in self._sides
        ]
        return sorted(both[0] & both[1], key=stages.order)

    def compare(self, stage: str, known: tuple[str, ...] = ()) -> Compared | None:
        """Join the key data and token sketches of a stage.

        Args:
            stage: canonical name; the keys compared are those of its micro-batches.
            known: notes of the stage that stand elsewhere already.

        Returns:
            What was found; None where a side has no key data.

        Raises:
            StoreError: a table is damaged. A key that cannot be read is left out, with a note.
        """
        benchmark, target = self._sides
        if benchmark is None or target is None:
            return None
        said: list[Said] = []
        pairs = planner.pair_steps(benchmark.steps(), target.steps(), self._map_steps, said)
        steps = {b: t for b, t in pairs if b is not None and t is not None}
        keys = sorted(k for k in {*benchmark.keys(), *target.keys()} if stage_of(k) == stage)
        tables, notes = [], _lacking((benchmark, target), keys)
        if keys:
            notes += [f"key data: {note}" for note in said if str(note) not in known]
        for step, other in steps.items():
            for key in keys:
                try:
                    rows = benchmark.rows(key, step), target.rows(key, other)
                except DumpError as error:
                    notes.append(f"{key}, step {step}: not compared: {error}")
                    continue
                why = benchmark.misfit(key, step) or target.misfit(key, other)
                joined = joining.join(key, step, *rows, why)
                tables.append(joined.table)
                notes += _unread((benchmark, target), key, (step, other))
                notes += joined.notes
        table = pl.concat([pl.DataFrame(schema=joining.SCHEMA), *tables])
        tokens, apart = self._tokens((benchmark, target), stage, steps, notes)
        if table.is_empty() and tokens is None and not notes:
            return None
        found = {KEY_DATA: table}
        sketched = None
        if tokens is not None:
            found[TOKEN_SKETCHES] = tokens
            errors = tokens.get_column("error")
            largest = errors.filter(errors.is_finite()).max()
            sketched = {"tokens": tokens.height, "max_error": largest} | apart
        summary = {"keys": joining.described(table), "token_sketches": sketched, "notes": notes}
        return Compared(summary, {name: t for name, t in found.items() if not t.is_empty()})

    def _tokens(
        self,
        sides: tuple[KeyData, KeyData],
        stage: str,
        steps: Mapping[int, int],
        notes: list[str],
    ) -> tuple[pl.DataFrame | None, dict[str, Any]]:
        """The stage's token sketches, joined; None where a side has none. And what was not joined:
        how many tokens one side has in no record, by step, and micro-batches of either side."""
        name = f"token_sketches/{stage}.parquet"
        paths = [path for side in self._paths if (path := listing.found(side, name)) is not None]
        if len(paths) < len(self._paths):
            return None, {}
        found, left_out = [], 0
        for name, side, path, own in zip(
            ("benchmark", "target"), sides, paths, (list(steps), list(steps.values())), strict=True
        ):
            sketched = _read(path)
            batches = {step: _stage_batches(side, stage, step, sketched) for step in own}
            lacking = [str(step) for step, found_batches in batches.items() if not found_batches]
            if lacking:
                notes.append(
                    f"token sketches of the {name}, step {', '.join(lacking)}: nothing says which "
                    f"samples the micro-batches of {stage} hold; they are not joined"
                )
            placed = sketches.placed(sketched, batches)
            left_out += placed.left_out
            if placed.left_out > 0 and not lacking:
                notes.append(
                    f"token sketches of the {name}: not joined are "
                    f"{counted(placed.left_out, 'micro-batch', 'micro-batches')} of another size "
                    "than their key data"
                )
            # named by the benchmark's step
            found.append(
                placed.table.with_columns(
                    pl.col("step").replace_strict(own, list(steps), return_dtype=pl.Int32)
                )
            )
        alone = {str(step): count for step, count in sketches.alone(*found).items()}
        return sketches.compare(*found), {"alone": alone, "left_out": left_out}


def _lacking(sides: tuple[KeyData, KeyData], keys: Sequence[str]) -> list[str]:
    have = [set(side.keys()) for side in sides]
    return [
        f"{key}: on the {'benchmark' if key in have[0] else 'target'} only"
        for key in keys
        if key not in have[0] or key not in have[1]
    ]


def _unread(sides: tuple[KeyData, KeyData], key: str, steps: tuple[int, int]) -> list[str]:
    """Notes of the sides whose files of a key are none that msprobe writes."""
    found = []
    for name, side, step in zip(("benchmark", "target"), sides, steps, strict=True):
        if files := side.unread(key, step):
            shown = ", ".join(files[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
            found.append(
                f"{key}, step {step}: not read of the {name}: no array {key}.npy or {key}.0.npy "
                f"among its files ({shown})"
            )
    return found


def _stage_batches(
    side: KeyData, stage: str, step: int, sketched: pl.DataFrame
) -> dict[BatchKey, MicroBatch]:
    """Micro-batches of a stage; empty where nothing tells what they held.

    Tokens are recorded in the log-prob stage's micro-batches. Another stage's are the same where it
    worked on the same samples in the same order, rank by rank, and has as many micro-batches; else
    they are its samples in the order of the mock proof, cut where the sketches' sizes say.
    """
    batches = side.micro_batches(step)
    if stage == stages.LOG_PROB or not side.proof:
        return batches
    known: dict[int, list[tuple[str, int, int]]] = {}
    for (rank, _), batch in sorted(batches.items()):
        rows = zip(batch.samples, batch.prompts, batch.responses, strict=True)
        known.setdefault(rank, []).extend(rows)
    lengths = {sample: (p, r) for rows in known.values() for sample, p, r in rows}
    shapes = sketches.shapes(sketched.filter(pl.col("step") == step))
    found: dict[BatchKey, MicroBatch] = {}
    for rank, order in side.order(stage, step).items():
        own = shapes.filter(pl.col("rank") == rank).sort("micro_step")
        same = order == [sample for sample, _, _ in known.get(rank, [])]
        if same and own.height == sum(key[0] == rank for key in batches):
            found |= {key: batch for key, batch in batches.items() if key[0] == rank}
        elif all(sample in lengths for sample in order):
            ordered = [(sample, *lengths[sample]) for sample in order]
            sizes = own.select("micro_step", "rows", "width").rows()
            found |= {(rank, micro): batch for micro, batch in sketches.cut(ordered, sizes).items()}
    return found


def _read(path: Path) -> pl.DataFrame:
    """Tokens of blocks; what routers chose is a record of its own, and compared as one."""
    try:
        return pl.read_parquet(path, glob=False).filter(~pl.col("name").str.ends_with(CHOSEN))
    except UNREADABLE as error:
        raise StoreError(f"{path} is not a readable table: {error}") from error


def _proof(side: Path) -> list[proof.Entry]:
    """The mock proof of a stored run; of scratch space or a collector's tree, its parts."""
    path = listing.found(side, proof.NAME)
    try:
        if path is not None:
            return proof.entries(jsonfile.mapping(jsonfile.load(path, most=_MAX_PROOF))["samples"])
        places = (side / "side/parts/samples", side / "parts/samples")
        parts = sorted(part for place in places for part in place.glob("*.jsonl"))
        lines = (line for part in parts for line in read_bytes(part, _MAX_PROOF).splitlines())
        return proof.entries([jsonfile.parse(line) for line in lines])
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{side}: the mock proof is damaged: {error}") from error
