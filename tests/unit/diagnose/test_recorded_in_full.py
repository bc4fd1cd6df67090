"""Does each side say the same of where its parts lie, and all that the other says of a thing?"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.diagnose.gate import partial, placed
from rlprobe.judge import routed
from rlprobe.store.parts import COPIES, GRADIENTS, WEIGHTS
from tests.unit.diagnose.stand_ins import evidence, found, rows, run

STAGE = "actor_update"
PLACE = {"step": 0, "stage": STAGE, "role": "actor", "rank": 0, "name": "w", "shape": [4, 2],
         "local_shape": [2, 2], "offset": "[0]", "complete": False, "kept": None}  # fmt: skip
WEIGHT = PLACE | {"dtype": "torch.float32", "digest": "a", "norm": 1.0, "sketch": [1.0]}
ELSEWHERE = [
    {"offset": "[2]"}, {"local_shape": [4, 2]}, {"complete": True}, {"shape": [8, 2]},
    {"role": "critic"},
]  # fmt: skip


def held(gradients: Any = (PLACE,), weights: Any = (WEIGHT,), **others: Any) -> Any:
    """A run whose parts lie so; None: it has no such table."""
    made = run(**others)
    schema = {**GRADIENTS, **COPIES}
    made.gradients = lambda: (
        None if gradients is None else pl.DataFrame(list(gradients), schema=schema, orient="row")
    )
    kept = [{name: row[name] for name in WEIGHTS} for row in weights]
    made.weights = lambda: pl.DataFrame(kept, schema=WEIGHTS, orient="row")
    return made


def test_parts_that_lie_alike_say_nothing() -> None:
    both = evidence(left=held(), right=held())
    assert placed.check(both) == placed.copies(both) == partial.check(both) == []


@pytest.mark.parametrize("change", ELSEWHERE)
def test_a_part_that_is_said_to_lie_elsewhere_is_named(change: dict[str, Any]) -> None:
    said = placed.check(evidence(left=held(), right=held([PLACE | change])))
    assert "gradients of 1 parameter, first" in said[0]
    assert "first w (actor_update, step 0, rank 0)" in said[0]
    said = placed.check(evidence(left=held(), right=held(weights=[WEIGHT | change])))
    assert "parts of 1 parameter" in said[0]


def test_of_a_model_that_enters_twice_both_times_are_looked_at() -> None:
    twice = [[WEIGHT, WEIGHT], [WEIGHT, WEIGHT | {"offset": "[2]"}]]
    left, right = (held(weights=one) for one in twice)
    assert placed.check(evidence(left=left, right=right))


@pytest.mark.parametrize("lost", [(), None])
def test_gradients_that_one_side_alone_places_are_said(lost: Any) -> None:
    for left, right in ((held(), held(lost)), (held(lost), held())):
        (said,) = placed.check(evidence(left=left, right=right))
        assert "placed on one side only" in said
    assert placed.check(evidence(left=held(lost), right=held(lost))) == []


@pytest.mark.parametrize(("kept", "said"), [(None, False), ("torch.float32", True)])
def test_copies_that_changes_were_read_off_are_held(kept: str | None, said: bool) -> None:
    assert bool(placed.copies(evidence(left=held(), right=held([PLACE | {"kept": kept}])))) == said
    text = found(left=held(), right=held([PLACE | {"kept": kept}]))
    assert ("copies of another format" in text) == said


@pytest.mark.parametrize("column", ["digest", "norm", "sketch"])
def test_a_parameter_that_one_side_measured_in_part_is_said(column: str) -> None:
    text = found(left=held(), right=held(weights=[WEIGHT | {column: None}]))
    assert f"their {column} on one side only, first w" in text
    both = held(weights=[WEIGHT | {column: None}])
    assert found(left=both, right=both) == ""


@pytest.mark.parametrize("column", ["max", "min", "mean", "norm", "digest", "value"])
@pytest.mark.parametrize("side", ["benchmark", "target"])
def test_a_record_that_one_side_has_in_part_is_said(column: str, side: str) -> None:
    own = {f"{column}_{name}": None for name in ("benchmark", "target")}
    full = {"value": "2.0", "digest": "sha256:0"}.get(column, 2.0)
    other = {"benchmark": "target", "target": "benchmark"}[side]
    said = f"their {column} on one side only, first Module.m"
    assert said in found(rows(**own | {f"{column}_{other}": full}))
    unseen = {"reason": "no difference seen by the sketch"}
    assert said in found(rows(**own | unseen | {f"{column}_{other}": full}))
    assert found(rows(**own)) == ""
    elsewhere = run(declared={"capture": {"engine": "msprobe"}})
    assert said not in found(rows(**own | {f"{column}_{other}": full}), right=elsewhere)


@pytest.mark.parametrize(("benchmark", "target"), [(True, False), (None, False), (True, None)])
def test_a_tensor_that_requires_gradients_on_one_side_only_is_said(
    benchmark: bool | None, target: bool | None
) -> None:
    def compared(*flags: bool | None) -> pl.LazyFrame:
        row = {"step": 0, "name": "Module.m", "status": "matched",
               "requires_grad_benchmark": flags[0], "requires_grad_target": flags[1]}  # fmt: skip
        kinds = dict.fromkeys(("requires_grad_benchmark", "requires_grad_target"), pl.Boolean)
        return pl.DataFrame([row], schema_overrides=kinds).lazy()

    (said,) = partial.check(evidence(compared=compared(benchmark, target)))
    assert "gradients pass on one side only through 1 record, first Module.m" in said
    assert partial.check(evidence(compared=compared(benchmark, benchmark))) == []
    elsewhere = evidence(compared=compared(benchmark, target))
    elsewhere.step.findings[STAGE].stage.misplaced = "other samples"
    assert partial.check(elsewhere) == []


@pytest.mark.parametrize(
    "lost",
    ["token_sketches/actor_update.parquet", "routing/actor_update.parquet",
     "logical/actor_update.parquet", "buffers.json", "optimizers.json"],
)  # fmt: skip
def test_a_table_that_one_side_alone_has_is_said(lost: str) -> None:
    left, right = run(), run()
    left.has = lambda name: True
    right.has = lambda name: name != lost
    assert partial.check(evidence(left=left, right=right)) == [f"on one side only: {lost}"]
    asked = {"capture": {"engine": "light", "token_sketch": True}}
    other = run(declared=asked)
    assert partial.check(evidence(left=left, right=other)) == [], "one was not asked for it"


LINE = {"stage": STAGE, "step": 0, "role": "actor", "ranks": [0], "update": 0, "groups": [],
        "buffers": [{"name": "inv_freq", "logical": True}]}  # fmt: skip


@pytest.mark.parametrize("document", ["buffers", "optimizers"])
@pytest.mark.parametrize(
    ("change", "said"),
    [({}, False), ({"role": "critic"}, True), ({"ranks": [0, 1]}, True), ({"step": 3}, False)],
)
def test_documents_are_of_the_same_processes(
    document: str, change: dict[str, Any], said: bool
) -> None:
    left, right = run(), run()
    setattr(left, document, lambda: [LINE])
    setattr(right, document, lambda: [LINE, LINE | change])
    assert bool(partial._processes(evidence(left=left, right=right))) == said


def test_a_buffer_is_called_alike_and_samples_are_of_one_role() -> None:
    left, right = run(), run()
    left.buffers = lambda: [LINE]
    right.buffers = lambda: [LINE | {"buffers": [{"name": "inv_freq", "logical": False}]}]
    assert (
        "buffers are said of other processes"
        in partial._processes(evidence(left=left, right=right))[0]
    )
    entry = {"stage": STAGE, "step": 0, "rank": 0, "samples": []}
    proofs = [run(proof=[entry | {"role": role}]) for role in ("actor", "critic")]
    assert (
        "samples are said of other processes"
        in partial._processes(evidence(left=proofs[0], right=proofs[1]))[0]
    )


def test_routers_choose_from_as_many_experts() -> None:
    def choices(experts: int) -> Any:
        row = {"step": 0, "rank": 0, "module": "mlp.gate", "experts": experts, "token": 7,
               "chosen": [1]}  # fmt: skip
        made = run()
        made.routing = lambda stage: pl.DataFrame([row])
        return made

    class Both:
        def __init__(self, target: int) -> None:
            self.run = {"benchmark": choices(4), "target": choices(target)}.get

    assert routed.sized_otherwise(Both(4), STAGE, 0) == []  # type: ignore[arg-type]
    assert routed.sized_otherwise(Both(5), STAGE, 0) == ["mlp.gate"]  # type: ignore[arg-type]
