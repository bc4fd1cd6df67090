"""Is a row of a stage what its type says, so that whoever reads one by name reads what is there?"""

from __future__ import annotations

import types
import typing

import polars as pl

from rlprobe.judge import changes, multiples
from rlprobe.judge.analysis import first_of
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import judge
from rlprobe.judge.row import Row, each, first
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

#: Of rows of several stages together.
ELSEWHERE = {"stage"}
KINDS = {pl.String: str, pl.Float64: float, pl.Boolean: bool, pl.List: list}


def kinds(annotation: object) -> set[object]:
    """The types that a key may have."""
    if isinstance(annotation, types.UnionType):
        return {kind for one in typing.get_args(annotation) for kind in kinds(one)}
    return {typing.get_origin(annotation) or annotation}


def test_its_keys_are_the_columns_of_a_stage_and_their_types(align: Align) -> None:
    found = align(Device(faults={"output model.layers.1.mlp.down_proj": lambda y: 1.01 * y}))
    results = Results.open(found.results)
    step = judge(results, 0)
    finding = first_of(step)
    assert finding is not None and finding.origin is not None
    finding = multiples.measured(results, 0, finding)
    table = finding.stage.rows
    declared = typing.get_type_hints(Row)
    assert declared.keys() - ELSEWHERE <= set(table.columns)
    for name, annotation in declared.items():
        if name not in ELSEWHERE:
            kind = table.schema[name]
            expected = int if kind.is_integer() else KINDS[kind.base_type()]
            assert expected in kinds(annotation), (name, kind, annotation)
    for rows in (other.stage.rows for other in step.findings.values()):
        lacking = {name for name in declared.keys() & {*rows.columns} if rows[name].has_nulls()}
        assert all(types.NoneType in kinds(declared[name]) for name in lacking), lacking
    assert finding.origin is not None and finding.origin.row.keys() <= {*table.columns}
    assert changes.dense_bound(finding.origin.row) > 0


def test_rows_of_a_table() -> None:
    table = pl.DataFrame({"name": ["a", "b"], "error": [0.5, None]})
    assert each(table) == [{"name": "a", "error": 0.5}, {"name": "b", "error": None}]
    assert first(table) == each(table)[0]
    assert first(table.clear()) is None
