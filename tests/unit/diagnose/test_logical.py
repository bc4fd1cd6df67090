"""Are records of whole stages put together from the ranks of any layout, and placed?"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pytest

from rlprobe import coordinates
from rlprobe.diagnose.gate import by_coordinates
from rlprobe.dumps.logical import SCHEMA
from rlprobe.judge import compared, execution, reasons, replicas
from rlprobe.judge.inputs import Results
from rlprobe.judge.logical import joining, layout, rows

STAGE = "actor_compute_log_prob"
GENERATOR = np.random.default_rng(5)
SAMPLES = [coordinates.token_keys(GENERATOR.integers(0, 99, length)) for length in (6, 4, 7, 3)]
WIDTH = 16
VALUES = [GENERATOR.standard_normal((len(keys), WIDTH)) for keys in SAMPLES]
ROWS = pl.DataFrame(
    schema=dict.fromkeys(compared.COLUMNS, pl.String)
    | {
        name: pl.Float64
        for name in compared.COLUMNS
        if name.startswith(("max", "min", "mean", "norm", "error")) and name != "error_kind"
    }
    | dict.fromkeys(("step", "rank", "rank_benchmark", "rank_target", "order", "call"), pl.Int32)
    | dict.fromkeys(("shape_benchmark", "shape_target"), pl.List(pl.Int64))
)


class Side:
    """A run: its ranks' parts of modules' records.

    Args:
        layout: of each rank: fields of the manifest's processes.
    """

    def __init__(self, *layout: Mapping[str, Any]) -> None:
        one = {"role": "actor", "tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1, "dp_rank": None,
               "chunks": None, "backend": "FSDPEngine"}  # fmt: skip
        processes = [
            SimpleNamespace(**{**one, "rank": rank, **fields}) for rank, fields in enumerate(layout)
        ]
        self.manifest = SimpleNamespace(layout=processes)
        self._rows: list[dict[str, Any]] = []

    def add(
        self,
        rank: int,
        module: str = "model.norm",
        samples: tuple[int, ...] = (0, 1, 2, 3),
        features: tuple[int, int] = (0, WIDTH),
        *,
        change: Any = None,
        direction: str = "forward",
        slot: str = "output",
    ) -> Side:
        first, last = features
        parts = [VALUES[sample][:, first:last] for sample in samples]
        if change is not None:
            parts = [change(part) for part in parts]
        keys = np.concatenate([SAMPLES[sample] for sample in samples])
        x = np.concatenate(parts)
        sketch = np.zeros((8, 61))
        made = coordinates.sketch(x, keys, first, WIDTH)
        sketch[: len(made)] = made
        row = {
            "step": 0, "rank": rank, "module": module, "op": "RMSNorm", "direction": direction,
            "slot": slot, "dtype": "torch.float32", "sequence": len(self._rows),
            "count": x.size, "tokens": len(keys), "calls": len(samples), "first": first,
            "features": last - first, "width": WIDTH, "squares": float((x**2).sum()),
            "sum": float(x.sum()), "max": float(x.max()), "min": float(x.min()),
            "identity": f"{int(np.add.reduce(keys)):016x}", "sketch": sketch.reshape(-1).tolist(),
        }  # fmt: skip
        self._rows.append(row)
        return self

    def logical(self, stage: str) -> pl.DataFrame | None:
        return pl.DataFrame(self._rows, schema=SCHEMA)

    def weights(self) -> None:
        return None


def results(benchmark: Side, target: Side) -> Results:
    sides = {"benchmark": benchmark, "target": target}
    return cast(Results, SimpleNamespace(run=sides.get))


def joined(benchmark: Side, target: Side) -> joining.Joined:
    return joining.join(ROWS, results(benchmark, target), STAGE, 0)


def row(found: joining.Joined, module: str = "model.norm") -> dict[str, Any]:
    return found.rows.filter(pl.col("module") == module).row(0, named=True)


ONE = Side({}).add(0)
TENSOR = ({"tp": 2, "dp_rank": 0, "chunks": 1}, {"tp": 2, "dp_rank": 0, "chunks": 1})
DATA = ({"dp": 2, "dp_rank": 0}, {"dp": 2, "dp_rank": 1})
LAYOUTS = {
    "data": lambda change: Side(*DATA).add(0, samples=(0, 2)).add(1, samples=(3, 1), change=change),
    "features": lambda change: (
        Side(*TENSOR).add(0, features=(0, 8)).add(1, features=(8, 16), change=change)
    ),
    "replicas": lambda change: Side(*TENSOR).add(0).add(1, change=change),
    "replicas of several": lambda change: (
        Side(*(({"dp": 2, "tp": 2, "dp_rank": rank // 2}) for rank in range(4)))
        .add(0, samples=(0, 1))
        .add(1, samples=(0, 1))
        .add(2, samples=(2, 3))
        .add(3, samples=(2, 3), change=change)
    ),
    # sequence or context parallelism: ranks of one model have other tokens
    "sequence": lambda change: (
        Side(*TENSOR).add(0, samples=(0, 1)).add(1, samples=(2, 3), change=change)
    ),
    "both": lambda change: (
        Side(*(({"dp": 2, "tp": 2, "dp_rank": rank // 2}) for rank in range(4)))
        .add(0, samples=(0, 1), features=(0, 8))
        .add(1, samples=(0, 1), features=(8, 16))
        .add(2, samples=(2, 3), features=(0, 8))
        .add(3, samples=(2, 3), features=(8, 16), change=change)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["there", "back"])
def test_ranks_of_any_layout_make_up_the_whole(layout: str, way: str) -> None:
    sides = [ONE, LAYOUTS[layout](None)]
    found = joined(*(sides if way == "there" else sides[::-1]))
    here = row(found)
    whole = np.concatenate(VALUES)
    assert (here["status"], here["error_kind"]) == ("matched", "sketch")
    assert here["error"] < 1e-6 and here["error_uncertainty"] == 1.0
    assert here["shape_target"] == [len(whole), WIDTH]
    for number, expected in (
        ("norm", np.linalg.norm(whole)), ("mean", whole.mean()), ("max", whole.max()),
    ):  # fmt: skip
        for side in ("benchmark", "target"):
            assert here[f"{number}_{side}"] == pytest.approx(expected, rel=1e-9), number
    assert (found.shared, found.paired, dict(found.places)) == (1, 1, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_one_rank_is_as_large_as_it_is(layout: str) -> None:
    found = joined(ONE, LAYOUTS[layout](lambda part: part * 1.1))
    clean, whole = np.concatenate(VALUES), np.linalg.norm(np.concatenate(VALUES))
    second = np.concatenate([VALUES[2], VALUES[3]])
    parts = {
        "data": np.concatenate([VALUES[3], VALUES[1]]),
        "features": clean[:, 8:],
        "replicas": clean,
        "replicas of several": second,
        "sequence": second,
        "both": second[:, 8:],
    }
    expected = 0.1 * np.linalg.norm(parts[layout]) / whole
    assert row(found)["error"] == pytest.approx(expected, rel=0.3)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("features", "only features 8 to 15 of 16 differ, which rank 1 has"),
        ("replicas", "of the ranks that hold the same, rank 1 differs"),
        ("replicas of several", "of the ranks that hold the same, rank 3 differs"),
    ],
)
def test_the_rank_that_alone_differs_is_named_with_its_part(layout: str, said: str) -> None:
    found = joined(ONE, LAYOUTS[layout](lambda part: part * 1.1))
    place = found.places[row(found)["name"]]
    assert str(place.said) == said and f"rank {place.rank}" in said


def test_a_fault_of_all_ranks_is_no_ranks() -> None:
    def scaled(part: np.ndarray) -> np.ndarray:
        return part * 1.1

    target = Side(*TENSOR).add(0, features=(0, 8), change=scaled)
    target.add(1, features=(8, 16), change=scaled)
    assert not joined(ONE, target).places


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Side(*TENSOR).add(0, features=(0, 8)), rows.INCOMPLETE),
        (Side({}).add(0, samples=(0, 1, 2)), rows.OTHER_TOKENS),
        (Side({}).add(0, samples=(0, 1, 2, 2)), rows.OTHER_TOKENS),
    ],
    ids=["a shard is missing", "a sample is missing", "another sample"],
)
def test_what_is_not_the_same_is_not_compared(target: Side, why: str) -> None:
    found = joined(ONE, target)
    assert (row(found)["status"], row(found)["reason"], row(found)["error"]) == ("shape", why, None)
    assert (found.shared, found.paired, found.strange) == (1, 0, why == rows.OTHER_TOKENS)
    grounds = [excuse.reason for excuse in joining.excuses(found)]
    assert (reasons.OTHER_PLACES in grounds) == (why == rows.OTHER_TOKENS)


@pytest.mark.parametrize("sides", [("target",), ("benchmark",), ("benchmark", "target")])
def test_what_is_not_finite_is_said_of_its_side(sides: tuple[str, ...]) -> None:
    def poisoned(part: np.ndarray) -> np.ndarray:
        return np.where(part == part.max(), np.nan, part)

    made = [
        Side({}).add(0, change=poisoned if side in sides else None)
        for side in ("benchmark", "target")
    ]
    here = row(joined(*made))
    assert here["status"] == "nonfinite"
    assert here["reason"] == ("both" if len(sides) == 2 else sides[0])


def test_modules_of_one_side_are_named_and_not_counted() -> None:
    target = Side({}).add(0).add(0, "model.embedding")
    found = joined(ONE, target)
    assert dict(found.alone) == {"benchmark": (), "target": ("model.embedding",)}
    assert (found.shared, found.paired) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "name", "divided"),
    [
        ({"pp": 2}, "model.decoder", True),
        ({"pp": 2}, "module.decoder", True),
        ({"chunks": 2}, "model.decoder", True),
        ({"pp": 2}, "model.norm", False),
        ({"pp": 2}, "model.layers.3.decoder", False),
        ({"tp": 2}, "model.decoder", False),
    ],
)
def test_a_pipelines_stacks_of_layers_are_no_partners(
    sizes: dict[str, Any], name: str, divided: bool
) -> None:
    """Under one name they hold other layers: what they take and give is of other places."""
    megatron = {"chunks": 1, "backend": "megatron", "dp_rank": 0}
    benchmark = Side(megatron).add(0, name).add(0)
    target = Side(megatron | sizes).add(0, name, change=lambda part: part * 3).add(0)
    found = joined(benchmark, target)
    own = found.rows.filter(pl.col("module") == name)
    if name != "model.norm":
        assert row(found)["status"] == "matched"
    if not divided:
        assert set(own.get_column("status")) == {"matched"} and not found.divided
        return
    assert own.get_column("status").to_list() == ["benchmark_only", "target_only"]
    assert found.divided == {name} and (found.shared, found.paired) == (1, 1)
    [excuse] = joining.excuses(found)
    assert excuse.reason == reasons.OTHER_MODULES
    assert found.rows.filter(excuse.rows).height == 2


def test_what_projections_send_back_is_added_up_where_one_side_has_them_in_one() -> None:
    stem = "model.layers.0.self_attn"
    parts = [2.0, 0.5, -1.0]
    benchmark = Side({})
    for name, factor in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
        benchmark.add(0, f"{stem}.{name}", direction="backward", slot="output",
                      change=lambda part, factor=factor: part * factor)  # fmt: skip
    target = Side({}).add(0, f"{stem}.qkv_proj", direction="backward", slot="output",
                          change=lambda part: part * sum(parts))  # fmt: skip
    for sides in ((benchmark, target), (target, benchmark)):
        found = joined(*sides)
        here = row(found, f"{stem}.qkv_proj")
        assert here["status"] == "matched" and here["error"] < 1e-6
        assert here["norm_diff"] is None, "the norm of a sum is estimated"
        assert found.rows.height == 1, "the parts are judged as their sum"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_loss_that_is_scaled_by_the_ranks_is_no_difference(factor: float) -> None:
    """FSDP averages over ranks, so that trainers scale their losses by them."""

    def gradients(side: Side, rank: int, samples: tuple[int, ...], by: float) -> None:
        side.add(rank, "lm_head", samples, direction="backward", slot="input",
                 change=lambda part: part * by)  # fmt: skip

    benchmark, target = Side({"dp": 1, "dp_rank": 0}), Side(*DATA)
    gradients(benchmark, 0, (0, 1, 2, 3), 1.0)
    gradients(target, 0, (0, 1), factor)
    gradients(target, 1, (2, 3), factor)
    assert row(joined(benchmark, target), "lm_head")["error"] < 1e-6
    other = Side(*DATA)
    gradients(other, 0, (0, 1), 3.0)
    gradients(other, 1, (2, 3), 3.0)
    assert row(joined(benchmark, other), "lm_head")["error"] > 0.3


def test_calls_stand_in_the_order_in_which_a_pipeline_runs_them() -> None:
    def pipeline() -> Side:
        side = Side(*({"pp": 2, "dp_rank": 0, "chunks": 2} for _ in range(2)))
        for rank, modules in enumerate(
            (("model.embed_tokens", "model.layers.0.mlp", "model.layers.2.mlp"),
             ("model.layers.1.mlp", "model.layers.3.mlp", "model.norm"))
        ):  # fmt: skip
            for module in modules:
                side.add(rank, module)
            for module in reversed(modules):
                side.add(rank, module, direction="backward", slot="input")
        return side

    found = joined(pipeline(), pipeline()).rows
    modules = found.filter(pl.col("direction") == "forward").sort("order")["module"].to_list()
    layers = [f"model.layers.{number}.mlp" for number in range(4)]
    assert modules == ["model.embed_tokens", *layers, "model.norm"]
    back = found.filter(pl.col("direction") == "backward").sort("order")["module"].to_list()
    assert back == modules[::-1]


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        (Side({}), Side({}), None),
        (Side({}), Side(*DATA), None),
        (Side(*TENSOR), Side(*TENSOR), None),
        (Side({}), Side({"chunks": 1}), "FSDP or one process against Megatron"),
        (Side({"chunks": 1}), Side(*TENSOR), "Megatron against Megatron TP 2"),
        (Side({"chunks": 2, "pp": 2}), Side(*TENSOR), "Megatron PP 2 against Megatron TP 2"),
    ],
)
def test_models_that_are_divided_otherwise(benchmark: Side, target: Side, said: str | None) -> None:
    found = layout.unlike(results(benchmark, target), STAGE)
    assert (None if found is None else str(found)) == (
        None if said is None else f"models are divided otherwise ({said})"
    )


@pytest.mark.parametrize(
    ("before", "updates"), [(2, [0, 0, 1, 1]), (1, [0, 1, 2, 3]), (None, [0, 0, 0, 0])]
)
def test_only_losses_before_the_first_update_are_of_the_weights_that_both_began_with(
    before: int | None, updates: list[int]
) -> None:
    """Those of later updates inherit what differs, as everything does that runs after one."""
    each = [
        {"step": 0, "rank": 0, "order": n, "name": f"loss.pg_loss.{n}.debug", "slot": "loss",
         "op": "loss.pg_loss", "call": n, "direction": "update", "status": "matched"}
        for n in range(4)
    ]  # fmt: skip
    count = 1 if before is None else 4 // before
    changed = [
        {"step": 0, "rank": 0, "order": 4 + n, "name": f"a.weight.grad_reduced.{n}.debug",
         "slot": "grad_reduced", "module": "a", "call": n, "direction": "update",
         "status": "matched"}
        for n in range(count)
    ]  # fmt: skip
    here = pl.concat([ROWS, pl.DataFrame([*each, *changed], schema=ROWS.schema)])
    sides = [Side({}).add(0) for _ in range(2)]
    found = joining.join(here, results(*sides), STAGE, 0, before)
    ordered, _ = execution.timeline(found.rows)
    losses = ordered.filter(pl.col("slot") == "loss").sort("order")
    assert losses.get_column("update").to_list() == updates
    assert losses.get_column("before_update").to_list() == [update == 0 for update in updates]


def test_losses_that_ranks_of_one_model_share_count_once() -> None:
    def loss(rank: int, value: float, status: str = "target_only") -> dict[str, Any]:
        numbers = dict.fromkeys(("max", "min", "mean", "norm"), value)
        found: dict[str, Any] = {
            "rank": rank, "name": "loss.pg_loss.0.debug", "slot": "loss", "status": status,
            "rank_target": rank, "name_target": "loss.pg_loss.0.debug",
            "dtype_target": "torch.float32", "shape_target": [], "value_target": None,
        }  # fmt: skip
        return found | {f"{name}_target": number for name, number in numbers.items()}

    # four ranks of one model, of which the third says something else; and one of another model
    rows = pl.DataFrame(
        [loss(0, 0.5, "matched"), loss(1, 0.5), loss(2, 0.6), loss(3, 0.5), loss(4, 0.5)],
        schema_overrides={"shape_target": pl.List(pl.Int64), "value_target": pl.String},
    )
    of = {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}
    found = joining.without_replicas(rows, "target", of)
    assert found.get_column("rank").to_list() == [0, 2, 4]
    alone = joining.without_replicas(rows, "target", {})
    assert alone.equals(rows), "of ranks that nothing is known of"


def test_one_replica_of_each_data_parallel_rank_counts() -> None:
    of = {0: 0, 1: 0, 2: 1, 3: 1}
    items = [(rank, name) for name in "ab" for rank in range(4)]
    found = replicas.alternatives(items, lambda item: item[0], of)
    assert [sorted({rank for rank, _ in each}) for each in found] == [[0, 2], [1, 3]]
    # one rank of a model alone writes what its last stage computes
    assert replicas.first([(1, "x"), (3, "x")], lambda item: item[0], of) == [(1, "x"), (3, "x")]
    assert replicas.alternatives([], lambda item: item, of) == [[]]


def judged_by_calls(target: Side, **changes: Any) -> tuple[Any, Any]:
    """Both sides laid out alike, and the stage whose one call stands for this record."""
    row = {"module": "model.norm", "direction": "forward", "slot": "output", "floor": 1e-6,
           "judged": True, "beyond": False, "excused_by": None, **changes}  # fmt: skip
    stage = SimpleNamespace(
        rows=pl.DataFrame([row], schema_overrides={"excused_by": pl.String}),
        laid_out=None,
        misplaced=None,
    )
    evidence: Any = SimpleNamespace(
        results=results(ONE, target),
        benchmark=ONE,
        target=target,
        step=SimpleNamespace(number=0, findings={STAGE: SimpleNamespace(stage=stage)}),
    )
    return evidence, stage


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Side({}).add(0), False),
        (Side({}).add(0, change=lambda x: x * (1 + 1e-7)), False),
        (Side({}).add(0, change=lambda x: x * (1 + 1e-5)), True),
        (Side({}).add(0, change=lambda x: 1.01 * x), True),
        (Side({}).add(0, change=lambda x: x + 0.01), True),
        (Side({}).add(0, change=lambda x: np.full_like(x, np.nan)), True),
        (Side({}).add(0, change=lambda x: 0 * x), True),
    ],
)
def test_where_calls_are_judged_these_must_not_say_otherwise(target: Side, said: bool) -> None:
    """Laid out alike, nothing else looks at them."""
    evidence, stage = judged_by_calls(target)
    assert bool(by_coordinates.check(evidence)) == said
    for unlike in ({"beyond": True}, {"judged": False}, {"excused_by": reasons.NEAR_TIES}):
        other, _ = judged_by_calls(target, **unlike)
        assert by_coordinates.check(other) == [], "nothing bounds what such calls add up to"
    stage.laid_out = "models are divided otherwise"
    assert by_coordinates.check(evidence) == [], "there they are what is judged"


@pytest.mark.parametrize(
    ("column", "value"),
    [("dtype", "torch.bfloat16"), ("op", "LayerNorm"), ("count", 9), ("tokens", 9), ("calls", 9),
     ("first", 9), ("features", 9), ("width", 99), ("identity", "0" * 16)],
)  # fmt: skip
@pytest.mark.parametrize("known", [True, False])
def test_what_a_record_by_coordinates_is_of_is_the_same_on_both_sides(
    column: str, value: Any, known: bool
) -> None:
    target = Side({}).add(0)
    target._rows[0][column] = value
    (text,) = by_coordinates.check(judged_by_calls(target, judged=known)[0])
    assert f"({column} {ONE._rows[0][column]} against {value})" in text


@pytest.mark.parametrize("statistic", ["squares", "sum", "max", "min"])
@pytest.mark.parametrize("value", [1e3, np.nan])
def test_a_statistic_by_coordinates_says_what_the_calls_say(statistic: str, value: float) -> None:
    target = Side({}).add(0)
    target._rows[0][statistic] += value
    assert by_coordinates.check(judged_by_calls(target)[0])


def test_a_record_by_coordinates_that_one_side_lacks_is_said() -> None:
    more = Side({}).add(0).add(0, "model.layers.0")
    assert (
        "on the target only, first model.layers.0"
        in by_coordinates.check(judged_by_calls(more)[0])[0]
    )
    assert (
        "on the benchmark only, first model.norm"
        in by_coordinates.check(judged_by_calls(Side({}))[0])[0]
    )
