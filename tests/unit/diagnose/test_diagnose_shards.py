"""Are shards of one parameter compared as the whole they make up, and left alone where unknown?"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pytest

from rlprobe import sketch
from rlprobe.dumps.schema import SCHEMA
from rlprobe.judge import shards
from rlprobe.judge.inputs import Results
from rlprobe.sketch_floors import UNSEEN

STAGE, NAME = "actor_update", "layer.weight.grad_reduced.0.debug"
WHOLE = np.random.default_rng(3).standard_normal((6, 5)).astype(np.float32)


class Side:
    """What a run holds of one parameter: parts of it on ranks, as an update's records and places.

    Args:
        directory: where the record table goes.
        parts: by rank: first row and number of rows.
        values: the whole.
        sketched: whether the records have sketches.
        known: whether the shards' places are.
    """

    def __init__(
        self,
        directory: Path,
        parts: list[tuple[int, int]],
        values: np.ndarray = WHOLE,
        *,
        sketched: bool = True,
        known: bool = True,
    ) -> None:
        self.numbers: list[dict[str, Any]] = []
        self.places, records = [], []
        for rank, (first, rows) in enumerate(parts):
            part = values[first : first + rows]
            offset = json.dumps({"dim": 0, "index": first}) if rows < len(values) else None
            place = {"rank": rank, "shape": list(values.shape), "local_shape": list(part.shape)}
            place |= {"offset": offset if known else None, "complete": rows == len(values)}
            self.places.append(place | {"name": "layer.weight", "stage": STAGE, "step": 0})
            numbers = {"max": part.max(), "min": part.min(), "mean": part.mean()}
            numbers["norm"] = np.linalg.norm(part)
            statistics = {name: float(value) for name, value in numbers.items()}
            self.numbers.append({"shape": list(part.shape), **statistics})
            made = sketch.sketch(part, offset=first * values.shape[1])
            row: dict[str, Any] = dict.fromkeys(SCHEMA)
            row |= {"rank": rank, "step": 0, "name": NAME, "slot": "grad_reduced"}
            records.append(row | {"sketch": made.tolist() if sketched else None})
        self._path = directory / f"{len(list(directory.iterdir()))}.parquet"
        pl.DataFrame(records, schema=SCHEMA).write_parquet(self._path)

    def weights(self) -> pl.DataFrame:
        return pl.DataFrame(self.places)

    def gradients(self) -> pl.DataFrame | None:
        return None

    def records(self, _: str) -> Path:
        return self._path


def join(
    benchmark: Side, target: Side, slot: str = "grad_reduced"
) -> tuple[list[dict[str, Any]], shards.Joined]:
    """Rows after joining, of the records as compare pairs them: rank by rank."""
    rows = []
    for rank in range(max(len(benchmark.numbers), len(target.numbers))):
        row: dict[str, Any] = {
            "rank": rank, "order": 7, "name": NAME, "module": "layer", "index": "weight",
            "slot": slot, "status": "shape", "reason": None, "error": 0.5,
            "error_kind": "statistics", "error_uncertainty": 1.0,
        }  # fmt: skip
        for name, side in (("benchmark", benchmark), ("target", target)):
            here = rank < len(side.numbers)
            row |= {f"name_{name}": NAME if here else None, f"rank_{name}": rank if here else None}
            row |= {f"digest_{name}": None}
            numbers = side.numbers[rank] if here else {}
            row |= {f"{n}_{name}": numbers.get(n) for n in ("shape", "max", "min", "mean", "norm")}
        row |= {f"{n}_diff": None for n in ("max", "min", "mean", "norm")}
        rows.append(row)
    kinds: dict[str, type[pl.DataType]] = {}
    kinds |= {f"{n}_diff": pl.Float64 for n in ("max", "min", "mean", "norm")}
    kinds |= dict.fromkeys(("reason", "digest_benchmark", "digest_target"), pl.String)
    table = pl.DataFrame(rows, schema_overrides=kinds, infer_schema_length=None)
    runs = {"benchmark": benchmark, "target": target}
    results = cast("Results", SimpleNamespace(run=runs.get))
    found = shards.joined(table, results, STAGE, 0)
    return found.rows.to_dicts(), found


def test_halves_are_compared_with_the_whole(tmp_path: Path) -> None:
    rows, found = join(Side(tmp_path, [(0, 6)]), Side(tmp_path, [(0, 4), (4, 2)]))
    (row,) = rows
    assert (row["status"], row["shape_target"], row["error"]) == ("matched", [6, 5], UNSEEN)
    for name in ("max", "min", "mean", "norm"):
        assert row[f"{name}_target"] == pytest.approx(row[f"{name}_benchmark"], rel=1e-6)
        assert row[f"{name}_diff"] == pytest.approx(0.0, abs=1e-6)
    left, right = found.sketches[0, NAME]
    assert np.allclose(left, right, atol=1e-5)


def test_what_differs_in_one_shard_is_seen_in_the_whole(tmp_path: Path) -> None:
    other = WHOLE.copy()
    other[5] *= 1.1
    (row,), _ = join(Side(tmp_path, [(0, 6)]), Side(tmp_path, [(0, 3), (3, 3)], other))
    true = np.linalg.norm(other - WHOLE) / np.linalg.norm(WHOLE)
    assert row["error"] == pytest.approx(true, rel=0.4)


def test_replicas_count_once(tmp_path: Path) -> None:
    whole, twice = Side(tmp_path, [(0, 6)]), Side(tmp_path, [(0, 3), (0, 3), (3, 3), (3, 3)])
    (row,), _ = join(whole, twice)
    assert (row["status"], row["error"]) == ("matched", UNSEEN)


class Owned(Side):
    """Ranks with the whole parameter, whose optimizers have stretches of its gradient each.

    Args:
        directory: where the record table goes.
        cut: the first element of the second stretch.
        kept: format of the copies that the stretches are stepped as.
    """

    def __init__(self, directory: Path, cut: int, kept: str | None = None) -> None:
        super().__init__(directory, [(0, 6), (0, 6)])
        self.kept = kept
        flat = WHOLE.reshape(-1)
        records = pl.read_parquet(self._path).to_dicts()
        self.owned = []
        for rank, (first, last) in enumerate(((0, cut), (cut, flat.size))):
            part = flat[first:last]
            numbers = {"max": part.max(), "min": part.min(), "mean": part.mean()}
            numbers["norm"] = np.linalg.norm(part)
            self.numbers[rank] = {"shape": [part.size], **{n: float(v) for n, v in numbers.items()}}
            records[rank]["sketch"] = sketch.sketch(part, offset=first).tolist()
            # two stretches that follow each other, as the rows of a fused projection do
            middle = first + 4
            stretches = [[first, 4], [middle, last - middle]]
            self.owned.append(
                {"rank": rank, "name": "layer.weight", "stage": STAGE, "step": 0,
                 "shape": [6, 5], "local_shape": [part.size], "complete": False,
                 "offset": json.dumps({"stretches": stretches}), "kept": self.kept}
            )  # fmt: skip
        pl.DataFrame(records, schema=SCHEMA).write_parquet(self._path)

    def gradients(self) -> pl.DataFrame | None:
        return pl.DataFrame(self.owned)


@pytest.mark.parametrize("cut", [7, 15, 22])
def test_stretches_that_optimizers_own_are_compared_with_the_whole(
    tmp_path: Path, cut: int
) -> None:
    for sides in ([(0, 6)], [(0, 3), (3, 3)]):
        (row,), _ = join(Side(tmp_path, sides), Owned(tmp_path, cut))
        assert (row["status"], row["error"]) == ("matched", UNSEEN)
        assert row["norm_target"] == pytest.approx(np.linalg.norm(WHOLE), rel=1e-6)


def test_changes_of_copies_lie_as_the_gradients_do(tmp_path: Path) -> None:
    (row,), _ = join(Side(tmp_path, [(0, 6)]), Owned(tmp_path, 7, "torch.float32"), "change")
    assert (row["status"], row["error"]) == ("matched", UNSEEN)
    # those of the model's own weights lie as these do, and a stretch of them is no whole
    (row,), _ = join(Side(tmp_path, [(0, 6)]), Owned(tmp_path, 7), "change")
    assert row["error"] is None


def test_without_sketches_norms_are_compared(tmp_path: Path) -> None:
    halves = Side(tmp_path, [(0, 3), (3, 3)], 1.01 * WHOLE, sketched=False)
    (row,), found = join(Side(tmp_path, [(0, 6)]), halves)
    assert row["error_kind"] == "statistics" and row["error"] == pytest.approx(0.01, rel=1e-3)
    assert not found.sketches


@pytest.mark.parametrize(
    ("parts", "known"), [([(0, 3)], True), ([(0, 3), (3, 3)], False)], ids=["missing", "unplaced"]
)
def test_of_unknown_wholes_nothing_is_said(
    tmp_path: Path, parts: list[tuple[int, int]], known: bool
) -> None:
    (row,), _ = join(Side(tmp_path, [(0, 6)]), Side(tmp_path, parts, known=known))
    assert row["error"] is None and row["status"] == "shape"
    assert "not all shards known" in row["reason"]


def test_equal_layouts_are_left_as_they_are(tmp_path: Path) -> None:
    halves = [(0, 3), (3, 3)]
    rows, found = join(Side(tmp_path, halves), Side(tmp_path, halves))
    assert [row["error"] for row in rows] == [0.5, 0.5] and not found.sketches


def test_zeros_agree_with_zeros_only(tmp_path: Path) -> None:
    zeros, halves = np.zeros_like(WHOLE), [(0, 3), (3, 3)]
    (row,), _ = join(Side(tmp_path, [(0, 6)], zeros), Side(tmp_path, halves, zeros))
    assert row["error"] == 0.0
    (row,), _ = join(Side(tmp_path, [(0, 6)], zeros), Side(tmp_path, halves))
    assert row["error"] == np.inf
