"""The blind pass over what lies beside a run's numbers, and what it says that nothing holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from rlprobe.coordinates import GROUPS
from rlprobe.diagnose import unheld
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import placed
from rlprobe.dumps.logical import SCHEMA
from rlprobe.judge import reasons
from rlprobe.selftest.blind import beside, disturb, quantities, run, score
from rlprobe.selftest.blind.disturb import UnchangedError
from rlprobe.selftest.blind.laboratory import Judgement
from rlprobe.selftest.blind.quantities import Quantity
from rlprobe.sketch import K
from rlprobe.store.manifest import Process, Recorded
from rlprobe.store.parts import COPIES, GRADIENTS

COORDINATE: dict[str, Any] = {
    "step": 0, "rank": 0, "module": "m", "op": "Linear", "direction": "forward", "slot": "output",
    "dtype": "torch.float32", "sequence": 3, "count": 8, "tokens": 4, "calls": 1, "first": 0,
    "features": 2, "width": 2, "squares": 4.0, "sum": 1.0, "max": 2.0, "min": -1.0,
    "identity": "0" * 16, "sketch": [1.0] * (GROUPS * K),
}  # fmt: skip
PLACE = {"step": 0, "stage": "actor_update", "role": "actor", "rank": 0, "name": "w",
         "shape": [4, 2], "local_shape": [2, 2], "offset": "[0]", "complete": False,
         "kept": None}  # fmt: skip
NUMBERS = {"squares", "sum", "max", "min"}


def differing(table: pl.DataFrame, one: Quantity, way: str) -> set[str] | None:
    """The columns of the first row that are not as they were; None where the row is gone."""
    out = io.BytesIO()
    table.write_parquet(out)
    found = beside.changed(out.getvalue(), one, way)
    assert found is not None
    after = pl.read_parquet(io.BytesIO(found))
    assert after.schema == table.schema
    assert after.tail(1).equals(table.tail(1)), "another row stays as it was"
    if after.height < table.height:
        return None
    first = [one.row(0, named=True) for one in (table, after)]
    return {name for name in first[0] if first[0][name] != first[1][name]}


@pytest.mark.parametrize(
    ("way", "columns"),
    [
        ("ten_floors", NUMBERS | {"sketch"}), ("nan", NUMBERS | {"sketch"}),
        ("zero", NUMBERS | {"sketch"}), ("contradiction", NUMBERS), ("dtype", {"dtype"}),
        ("shape", {"width", "features"}), ("elsewhere", {"identity"}), ("missing", None),
    ],
)  # fmt: skip
def test_a_record_by_coordinates_is_disturbed_in_all_that_says_it(
    way: str, columns: set[str] | None
) -> None:
    assert way in quantities.WAYS[quantities.COORDINATE]
    table = pl.DataFrame([COORDINATE, COORDINATE], schema=SCHEMA)
    one = Quantity(quantities.COORDINATE, None, "f", 0, (), "m", 1e-6, None)
    assert differing(table, one, way) == columns


def test_all_numbers_by_coordinates_grow_alike() -> None:
    made = beside._made(
        COORDINATE, Quantity(quantities.COORDINATE, None, "f", 0, (), "m", 0.05, None), "ten_floors"
    )
    assert made["max"] / 2.0 == made["sketch"][0] == pytest.approx(1.5)
    assert made["squares"] / 4.0 == pytest.approx(1.5**2)


@pytest.mark.parametrize(
    ("way", "columns"),
    [("elsewhere", {"offset"}), ("shape", {"local_shape"}), ("dtype", {"kept"}), ("missing", None)],
)
def test_the_place_of_a_gradient_is_disturbed(way: str, columns: set[str] | None) -> None:
    assert way in quantities.WAYS[quantities.PLACE]
    table = pl.DataFrame([PLACE, PLACE], schema={**GRADIENTS, **COPIES})
    one = Quantity(quantities.PLACE, None, "gradients.parquet", 0, (), "w", None, None)
    assert differing(table, one, way) == columns


@pytest.mark.parametrize("way", quantities.WAYS[quantities.CALL])
@pytest.mark.parametrize("column", ["stack", "order", "requires_grad"])
def test_of_a_call_one_thing_is_disturbed(column: str, way: str) -> None:
    row = {"name": "m", "stack": "File x.py", "order": 3, "requires_grad": True}
    table = pl.DataFrame([row, row])
    one = Quantity(quantities.CALL, None, "f", 0, (), "m", None, None, key=column)
    if (column, way) == ("order", "missing"):
        with pytest.raises(AssertionError):
            differing(table, one, way)
    else:
        assert differing(table, one, way) == {column}


@pytest.mark.parametrize(
    ("field", "new"),
    [("tp_rank", 1), ("dp", 2), ("backend", "FSDP disturbed"), ("sequence_parallel", True)],
)
def test_a_process_may_stand_elsewhere_or_be_lost(field: str, new: Any) -> None:
    layout = [Process(role="actor", rank=rank, world_size=2, backend="FSDP",
                      sequence_parallel=False) for rank in (0, 1)]  # fmt: skip
    one = Quantity(quantities.LAYOUT, None, "manifest.json", 1, (), "…", None, None, key=field)
    moved = beside.laid_out(layout, one, quantities.TEN_FLOORS)
    assert moved == [layout[0], layout[1].model_copy(update={field: new})]
    assert beside.laid_out(layout, one, quantities.MISSING) == layout[:1]
    run = SimpleNamespace(manifest=SimpleNamespace(layout=layout))
    assert {q.key for q in beside._layout(run)} == set(Process.model_fields)  # type: ignore[arg-type]
    for other, said in ((moved, f"rank 1 has {field}"), (layout[:1], "rank 1 is on one side only")):
        assert said in placed._processes(layout, other)[0]
    assert placed._processes(layout, layout) == []


@pytest.mark.parametrize("kind", [quantities.DUMP, quantities.TABLE])
def test_a_file_as_a_whole_may_be_lost(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f").write_text("{}")
    one = Quantity(kind, None, "f", None, (), "f", None, None)
    assert disturb.contents(tmp_path, one, "missing") == {"f": None}


@pytest.mark.parametrize(
    ("way", "changed"),
    [("shape", {"digest", "shape", "local_shape"}), ("elsewhere", {"offset", "complete"})],
)
def test_a_weight_may_lie_elsewhere(tmp_path: Path, way: str, changed: set[str]) -> None:
    row = {"name": "w", "dtype": "torch.float32", "digest": "sha256:ab", "norm": 2.0,
           "sketch": [1.0], "shape": [4, 2], "local_shape": [4, 2], "offset": None,
           "complete": True}  # fmt: skip
    table = pl.DataFrame([row], schema_overrides={"offset": pl.String})
    table.write_parquet(tmp_path / "w")
    one = Quantity(quantities.WEIGHT, None, "w", 0, (), "w", None, None)
    (data,) = disturb.contents(tmp_path, one, way).values()
    assert data is not None
    after = pl.read_parquet(io.BytesIO(data)).row(0, named=True)
    assert {name for name in row if row[name] != after[name]} == changed


def test_one_part_of_what_says_a_thing_is_lost_and_another_in_the_next_row() -> None:
    row = {"digest": "a", "norm": 1.0, "sketch": None}
    lost = [disturb._part(row, ("digest", "norm", "sketch"), at) for at in range(3)]
    assert lost == ["digest", "norm", "digest"]
    with pytest.raises(UnchangedError):
        disturb._part({"digest": "a"}, ("digest", "norm"), 0)


ENVIRONMENT = {"actor-rank0": {"device": "cpu", "switches": {"tf32": False}, "code": {"verl": "a"},
                               "threads": {"cpus": 2, "torch": 1}}}  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Any:
    (tmp_path / "dump").mkdir()
    settings = {"trainer": {"project_name": "x"}, "actor": {"optim": {"lr": 1e-3}}}
    (tmp_path / unheld.CONFIGURATION).write_text(json.dumps(settings))
    files = [
        unheld.CONFIGURATION, "dump/actor_update/step0/rank0/stack.json",
        "dump/actor_update/step0/rank0/dump.json", "dump/data/x/step0/values.json",
        "records/actor_update.parquet", "weights.parquet", "token_sketches/actor_update.parquet",
        "states/step1/actor.json",
    ]  # fmt: skip
    return SimpleNamespace(
        path=tmp_path,
        has=lambda name: name in files,
        checked=lambda name: tmp_path / name,
        environment=lambda: ENVIRONMENT,
        metrics=lambda: [{"metrics": {"actor/loss": 1.0, "timing_s/step": 2.0}}],
        manifest=SimpleNamespace(
            files=[SimpleNamespace(path=path) for path in files],
            stages={"actor_update": SimpleNamespace(records=7, ranks=[0])},
            recorded=Recorded(weights={"0": "a"}, samples={"0": "b"}),
        ),
    )


def test_the_diagnosis_counts_what_is_held_against_nothing(target: Any) -> None:
    assert unheld.of(target) == {
        reasons.INTENDED: 3, reasons.HARMLESS: 1, reasons.UNIMPORTED: 1, reasons.SHOWN: 7,
        reasons.COPIED: 2 + 3, reasons.TIMED: 1,
    }  # fmt: skip


def test_files_are_lost_one_by_one_and_copies_are_declared(target: Any) -> None:
    tables = {one.file: one.stage for one in beside._tables(target)}
    assert tables == {
        unheld.CONFIGURATION: None, "weights.parquet": None,
        "token_sketches/actor_update.parquet": "actor_update",
    }  # fmt: skip
    assert [one.declared for one in beside._dumps(target)] == [reasons.COPIED] * 2


@pytest.mark.parametrize("listed", [True, False])
def test_what_the_diagnosis_has_not_listed_is_not_declared(listed: bool) -> None:
    said = {reasons.SHOWN: 1} if listed else {}
    before = Judgement("aligned", [GateItem("weights", "open", "…")], {}, unheld=said)
    one = Quantity(quantities.CALL, None, "f", 0, (), "stack of m", None, reasons.SHOWN)
    expected = (score.DECLARED, reasons.SHOWN) if listed else (score.SILENT, "")
    assert run._outcome(before, before, one, quantities.TEN_FLOORS) == expected
