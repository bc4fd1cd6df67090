"""Rules of causes that need a shape of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.cause import losses, measure
from rlprobe.diagnose.cause.classify import judged
from rlprobe.diagnose.cause.hypotheses import factor, rounding
from rlprobe.diagnose.cause.hypothesis import Found
from rlprobe.judge import execution, origin
from rlprobe.judge.tokens import Profile
from rlprobe.said import exactly

RANDOM = np.random.default_rng(0)
GRADIENT = RANDOM.standard_normal((64, 32))


def row(target: np.ndarray, benchmark: np.ndarray = GRADIENT) -> Any:
    """A record against ``target``, measured by a sketch."""
    found: dict[str, Any] = {
        "error": float(np.linalg.norm(target - benchmark) / np.linalg.norm(benchmark)),
        "error_kind": "sketch", "error_uncertainty": 0.09, "dtype_benchmark": "torch.float32",
        "shape_benchmark": list(benchmark.shape),
        "mean_diff": float(target.mean() - benchmark.mean()),
    }  # fmt: skip
    for side, values in (("benchmark", benchmark), ("target", target)):
        found[f"norm_{side}"] = float(np.linalg.norm(values))
        found[f"max_{side}"], found[f"min_{side}"] = float(values.max()), float(values.min())
    return found


def lacks(target: np.ndarray) -> bool:
    return measure.lacks(row(target))


def cause(rows: Any, here: origin.Origin, profile: Profile | None = None, world: int = 1) -> Found:
    """What is judged of an origin in a stage of these rows."""
    stage = SimpleNamespace(rows=rows, misplaced=None, name="actor_update")
    finding: Any = SimpleNamespace(stage=stage, origin=here, key_data=[], outcomes=[])
    step: Any = SimpleNamespace(key_data={})
    return judged(step, finding, world, profile)


@pytest.mark.parametrize("rows", [[3], list(range(8)), list(range(0, 64, 4))])
def test_rows_that_are_left_out(rows: list[int]) -> None:
    target = GRADIENT.copy()
    target[rows] = 0.0
    assert lacks(target)


@pytest.mark.parametrize(
    "target",
    [
        0.9 * GRADIENT,
        GRADIENT + 0.3 * RANDOM.standard_normal(GRADIENT.shape),
        np.abs(GRADIENT) ** 0.5 * np.sign(GRADIENT),
        np.roll(GRADIENT, 1, axis=0),
        -GRADIENT,
        0.7 * GRADIENT + 0.2 * RANDOM.standard_normal(GRADIENT.shape),
    ],
)
def test_what_is_left_out_is_no_factor_noise_or_other_law(target: np.ndarray) -> None:
    assert not lacks(target)


def clipped(wrong: list[str], names: list[str]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "name": [f"{name}.weight.grad_reduced.0.debug" for name in names],
            "module": names,
            "slot": "grad_reduced",
            "phase": execution.GRADIENTS,
            "micro_batch": 4,
            "judged": True,
            "beyond": [name in wrong for name in names],
        }
    )


@pytest.mark.parametrize(
    ("wrong", "count", "module"), [(["m2"], 6, "m2"), (["m1", "m2"], 6, None), (["m2"], 3, None)]
)
def test_one_module_whose_gradients_alone_differ_is_named(
    wrong: list[str], count: int, module: str | None
) -> None:
    rows = clipped(wrong, [f"m{i}" for i in range(count)])
    found = origin.find(rows, [])
    assert found is not None
    assert (found.kind, found.module) == (origin.REDUCTION, module)
    # nothing that ran before was judged, so nothing is said of it
    assert found.reason.startswith("activations and their gradients were not judged")
    before = rows.with_columns(phase=pl.lit(execution.BACKWARD), beyond=False, slot=pl.lit("input"))
    found = origin.find(pl.concat([before, rows]), [])
    assert found is not None
    assert found.reason.startswith("gradients of activations agree within noise")


def test_a_parameters_gradient_comes_after_what_arrives_at_its_module() -> None:
    """msprobe lists it first, so that the module would be blamed for what the loss sends back."""
    listed = [
        ("Module.head.Linear.forward.0.output.0", "forward", "output"),
        ("Module.head.Linear.parameters_grad.0.weight", "backward", "grad"),
        ("Module.head.Linear.backward.0.input.0", "backward", "input"),
        ("Module.head.Linear.backward.0.output.0", "backward", "output"),
    ]
    table = pl.DataFrame(
        [
            {"order": order, "name": name, "module": "head", "op": "Linear", "call": 0,
             "direction": direction, "slot": slot}
            for order, (name, direction, slot) in enumerate(listed)
        ]
    )  # fmt: skip
    ordered, _ = execution.timeline(table)
    assert ordered.get_column("slot").to_list() == ["output", "input", "grad", "output"]


@pytest.mark.parametrize("lone", ["dtype_benchmark", "dtype_target", None])
def test_a_gradient_that_one_side_alone_passes_on_is_cut_off_there(lone: str | None) -> None:
    """The block's own code would be blamed, which adds up what it is given."""
    ran = [
        ("block", "input"), ("block.mlp", "input"), ("block.mlp.up", "input"),
        ("block.mlp.up", "output"), ("block.mlp", "output"), ("block.attn", "input"),
        ("block.attn", "output"), ("block", "output"),
    ]  # fmt: skip
    forward = [(module, "output") for module in ("block.attn", "block.mlp.up", "block.mlp")]
    rows = pl.DataFrame(
        [
            {"order": order, "name": f"Module.{module}.Op.{direction}.0.{slot}.0",
             "module": module, "op": "Op", "call": 0, "direction": direction, "slot": slot}
            for order, (direction, (module, slot)) in enumerate(
                [("forward", one) for one in [*forward, ("block", "output")]]
                + [("backward", one) for one in ran]
            )
        ]
    )  # fmt: skip
    cut = pl.col("module").is_in(["block.mlp", "block.mlp.up"]) & (pl.col("slot") == "output")
    cut &= pl.col("direction") == "backward"
    rows, calls = execution.timeline(rows)
    late = pl.col("module").is_in(["block.attn"]) & (pl.col("direction") == "backward")
    missing = cut & pl.lit(lone is not None)
    rows = rows.with_columns(
        judged=~missing,
        beyond=late | ((pl.col("module") == "block") & (pl.col("slot") == "output")
                       & (pl.col("direction") == "backward")),
        error=pl.when(missing).then(None).otherwise(0.5),
        **{
            name: pl.when(cut & pl.lit(name == lone)).then(None).otherwise(pl.lit("torch.float32"))
            for name in ("dtype_benchmark", "dtype_target")
        },
    )  # fmt: skip
    found = origin.find(rows, calls)
    assert found is not None
    if lone is None:
        assert (found.kind, found.module) == (origin.GLUE, "block")
        return
    assert (found.kind, found.module) == (origin.CUT, "block.mlp"), "the outermost"
    side = "target" if lone == "dtype_benchmark" else "benchmark"
    assert f"on the {side} alone passes one on" in found.reason


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)


def test_a_rounding_is_one_where_extremes_move_as_roundings_do() -> None:
    rounded = row(bf16(GRADIENT))
    assert rounding.rounded_to(rounded) == "bfloat16" == rounding.like(rounded)
    some = GRADIENT.copy()
    inner = (some < some.max()) & (some > some.min())
    some[inner] += 2e-3 * RANDOM.standard_normal(inner.sum())
    assert 0.5 < row(some)["error"] / rounded["error"] < 2.0
    assert rounding.rounded_to(row(some)) is None
    # as large as a rounding, the extremes moved too: it is still none
    like = GRADIENT * (1.0 + RANDOM.choice([-1, 1], GRADIENT.shape) * 0.42 * 2.0**-8)
    assert rounding.like(row(like)) == "bfloat16" and rounding.rounded_to(row(like)) is None


def test_a_factor_is_none_where_the_error_says_more_than_the_norm() -> None:
    left = factor.left(row(0.99 * GRADIENT))
    assert left is not None and left <= 1.0
    # a part of another tensor of the same size: | f - 1 | = e / sqrt(2)
    other = RANDOM.standard_normal(GRADIENT.shape)
    other *= np.linalg.norm(GRADIENT) / np.linalg.norm(other)
    left = factor.left(row(GRADIENT + 1e-5 * (other - GRADIENT)))
    assert left is not None and left > 1.0


HERE = {"micro_batch": 0, "phase": 0, "slot": "input", "rank": 0, "module": "o_proj",
        "op": "Linear", "index": "0"}  # fmt: skip
#: Probabilities of an attention that agree.
CHANCES = {"module": "attn", "micro_batch": 0, "phase": 0, "slot": "output", "error": 0.0,
           "shape_benchmark": [2, 4, 9, 9], "beyond": False, "judged": True, "max_benchmark": 1.0,
           "max_target": 1.0, "min_benchmark": 0.0, "min_target": 0.0, "rank": 0, "op": "Attention",
           "index": "1"}  # fmt: skip


def attended(measured: Any, profile: Profile | None, **chances: Any) -> Found:
    """An attention's result differs, and its probabilities do as given."""
    here = origin.Origin(origin.GLUE, "attn", "Attention", measured | HERE, exactly(""))
    return cause(pl.DataFrame([CHANCES | chances]), here, profile)


@pytest.mark.parametrize(
    "profile", [Profile(1.5, 0.01, None), Profile(1.1, 0.9, None), Profile(1e-6, 0.9, 8), None]
)
def test_where_attention_parts_along_the_sequence_is_said_and_names_no_cause(
    profile: Profile | None,
) -> None:
    found = attended(row(GRADIENT + 0.1 * RANDOM.random(GRADIENT.shape)), profile)
    assert found.cause == "unknown"
    said = "; ".join(found.said)
    assert ("position 8" in said) == (profile is not None and profile.onset == 8)
    assert ("last tokens of sequences hardly differ" in said) == (
        profile is not None and profile.last == 0.01
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [(0.0, "do not differ"), (1e-6, "hardly differ (1e-06 of the others' error)"),
     (2e-3, "hardly differ (0.002 of the others' error)"),
     (0.1, "differ less (0.1 of the others' error)"), (0.5, "differ (0.5 of the others' error)")],
)  # fmt: skip
def test_of_tokens_at_the_ends_it_is_said_how_much_they_differ(size: float, words: str) -> None:
    ends = Profile(size, 1.5, None)
    said = attended(row(GRADIENT + 0.1 * RANDOM.random(GRADIENT.shape)), ends).said
    assert f"the first tokens of sequences {words}" in [str(line) for line in said]


def test_a_head_that_is_not_written_is_no_mask() -> None:
    target = GRADIENT.copy()
    target[:, 8:16] = 0.0
    found = attended(row(target), Profile(0.4, 0.4, None))
    assert found.cause == "unknown" and "a part of it is set to 0" in found.said[-1]


@pytest.mark.parametrize(
    ("lowest", "sums", "found"),
    [((0.0, 1e-9), 1.0, "mask"), ((1e-4, 0.0), 1.0, "mask"), ((0.0, 0.0), 1.0, "unknown"),
     ((1e-9, 2e-9), 1.0, "unknown"),
     ((1e-9, 0.0), 1.0, "unknown"),  # it may have vanished in fp16
     ((0.0, 1e-9), 0.97, "unknown"), ((1e-4, 0.0), 1.02, "unknown")],  # noise, and dropout
)  # fmt: skip
def test_only_what_masks_nothing_or_something_new_is_a_mask(
    lowest: tuple[float, float], sums: float, found: str
) -> None:
    said = attended(
        row(GRADIENT + 0.1 * RANDOM.random(GRADIENT.shape)), None,
        beyond=True, error=0.03, max_target=0.9, mean_benchmark=1 / 9, mean_target=sums / 9,
        norm_benchmark=2.0, norm_target=1.9, dtype_benchmark="torch.float32",
        min_benchmark=lowest[0], min_target=lowest[1],
    )  # fmt: skip
    assert said.cause == found
    assert f"sum to {sums:g} times" in "; ".join(said.said)


def of_module(measured: Any, module: str, operator: str) -> Found:
    measured |= {
        "slot": "output", "index": "0", "op": operator, "module": module, "rank": 0,
        "micro_batch": 0, "phase": execution.FORWARD, "call_id": 3, "judged": True, "beyond": True,
    }  # fmt: skip
    for name in ("max", "min", "norm"):
        measured[f"{name}_diff"] = measured[f"{name}_target"] - measured[f"{name}_benchmark"]
    started = origin.Origin(origin.MODULE, module, operator, measured, exactly(""))
    return cause(pl.DataFrame([measured]), started)


def test_a_norms_name_is_no_cause() -> None:
    """A pure factor is one; another epsilon shrinks small tokens more, as much else may."""
    assert of_module(row(2.0 * GRADIENT), "model.norm", "Qwen2RMSNorm")[0] == "constant_factor"
    tokens = GRADIENT * (1 - 1e-3 * RANDOM.random((len(GRADIENT), 1)))
    found = of_module(row(tokens), "model.norm", "Qwen2RMSNorm")
    assert found.cause == "unknown" and "times the benchmark's" in found.said[0]


def test_a_rotary_table_rounded_to_bfloat16_is_one_of_other_positions_no_more() -> None:
    bits = GRADIENT.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    assert of_module(row(rounded.astype(float)), "m.rotary_emb", "Rotary")[0] == "rounding_order"


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda a: a + 1, "position"), (lambda a: a * 1.5, "position"),
     (lambda a: a[::-1], "position"), (lambda a: a + RANDOM.random(a.shape), "position")],
)  # fmt: skip
def test_a_table_of_other_angles_is_one_of_other_positions(change: Any, found: str) -> None:
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(16) / 16)
    assert of_table(angles, change(angles), lambda table: table) == found


@pytest.mark.parametrize(
    "change",
    [lambda t: t + 0.1 * RANDOM.standard_normal(t.shape), lambda t: t * 1.05 + 0.01,
     lambda t: np.where(RANDOM.random(t.shape) < 0.1, 0.0, t),
     lambda t: t + 1e-5 * RANDOM.standard_normal(t.shape), lambda t: np.abs(t) ** 1.1 * np.sign(t)],
)  # fmt: skip
def test_what_is_no_table_of_angles_has_no_positions(change: Any) -> None:
    """A rotary module's name is no verdict: what it hands out must be cosines and sines."""
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(16) / 16)
    assert of_table(angles, angles, change) == "unknown"


def of_table(before: np.ndarray, after: np.ndarray, change: Any) -> str:
    """The class of a rotary module's cosines and sines, changed."""

    def table(angles: np.ndarray) -> np.ndarray:
        return np.concatenate([np.cos(angles), np.sin(angles)], -1)

    return of_module(row(change(table(after)), table(before)), "m.rotary_emb", "Rotary").cause


@pytest.mark.parametrize(("factors", "found"), [((1.0, 1.3), "reduction"),
                                                ((1.3, 1.32), "reduction"),
                                                ((0.61, 0.611), "reduction"),
                                                ((1.3, 1.3), "optimizer")])  # fmt: skip
def test_ranks_that_clip_each_by_its_own_norm(factors: tuple[float, ...], found: str) -> None:
    rows = [
        {
            **row(factor * GRADIENT), "rank": rank, "slot": "grad_clipped", "micro_batch": 0,
            "judged": True, "beyond": factor != 1.0, "phase": execution.GRADIENTS, "floor": 1e-5,
        }
        for rank, factor in enumerate(factors)
    ]  # fmt: skip
    measured: Any = rows[-1]
    started = origin.Origin(origin.CLIPPING, None, None, measured, exactly(""))
    assert cause(pl.DataFrame(rows), started, world=2).cause == found


@pytest.mark.parametrize("factor", [2 / 3, 0.25, 3.0])
@pytest.mark.parametrize(("own", "world", "found"), [(True, 2, "reduction"),
                                                     (True, 1, "constant_factor"),
                                                     (False, 2, "constant_factor")])  # fmt: skip
def test_a_factor_that_each_process_has_not_is_of_the_reduction(
    factor: float, own: bool, world: int, found: str
) -> None:
    """Each process's own gradients agree in all micro-batches, or are not known in one of them."""
    common = {"judged": True, "call_id": 1}
    rows = [
        {
            **row(GRADIENT * (1 + 1e-7)), **common, "rank": rank, "slot": "grad", "beyond": False,
            "micro_batch": index, "phase": execution.BACKWARD,
        }
        for rank in range(world)
        for index in range(2 if own else 1)
    ]  # fmt: skip
    rows += [
        {**each, "slot": "input"} for each in rows if own
    ] or [{**rows[0], "slot": "input", "micro_batch": 1}]  # fmt: skip
    rows += [
        {
            **row(factor * GRADIENT), **common, "rank": rank, "slot": "grad_reduced",
            "beyond": True, "micro_batch": 2, "phase": execution.GRADIENTS,
        }
        for rank in range(world)
    ]  # fmt: skip
    measured: Any = rows[-1]
    started = origin.Origin(origin.REDUCTION, None, None, measured, exactly(""))
    assert cause(pl.DataFrame(rows), started, world=world).cause == found


def test_a_part_of_the_loss_that_one_side_alone_has_is_named() -> None:
    """An entropy bonus: verl reports the part only where its coefficient is not 0."""
    rows = pl.DataFrame(
        {"slot": ["loss", "loss", "output"], "index": ["actor_pg_loss", "actor_entropy_loss", "0"],
         "status": ["matched", "target_only", "target_only"]}
    )  # fmt: skip
    assert losses.lone_parts(rows) == ["actor_entropy_loss (target)"]
    assert losses.lone_parts(rows.head(1)) == []
