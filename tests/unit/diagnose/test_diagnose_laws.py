"""Laws that one record's numbers may follow, and what is said of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.cause.classify import judged
from rlprobe.diagnose.cause.hypotheses import clip, factor, subset
from rlprobe.diagnose.cause.hypothesis import Found
from rlprobe.judge import execution, origin
from rlprobe.judge.keydata import Difference
from rlprobe.judge.outcomes import Outcome
from rlprobe.said import exactly

RANDOM = np.random.default_rng(0)
INPUT = RANDOM.standard_normal((40, 64)) * 3.0


def record(b: np.ndarray, t: np.ndarray, **fields: Any) -> Any:
    """A record that differs, as a comparison of two sketches leaves it."""
    found: dict[str, Any] = {
        "error": float(np.linalg.norm(t - b) / np.linalg.norm(b)), "error_kind": "sketch",
        "error_uncertainty": 0.09, "dtype_benchmark": "torch.float32", "floor": 1e-5,
        "shape_benchmark": list(b.shape), "mean_diff": float(t.mean() - b.mean()), "rank": 0,
        "micro_batch": 0, "phase": execution.FORWARD, "slot": "output", "index": "0", "op": "Op",
        "module": "m", "name": "m.output", "call_id": 7, "judged": True, "beyond": True,
        "status": "matched", "value_benchmark": None, "value_target": None,
    }  # fmt: skip
    for side, values in (("benchmark", b), ("target", t)):
        found |= {
            f"norm_{side}": float(np.linalg.norm(values)), f"mean_{side}": float(values.mean()),
            f"max_{side}": float(values.max()), f"min_{side}": float(values.min()),
        }  # fmt: skip
    for name in ("max", "min", "norm"):
        found[f"{name}_diff"] = found[f"{name}_target"] - found[f"{name}_benchmark"]
    return found | fields


def finding(
    rows: list[Any],
    kind: str = origin.MODULE,
    first: Any = None,
    outcomes: list[Outcome] | None = None,
) -> Any:
    """A stage that parts at its first row, or at another one."""
    table = pl.DataFrame(rows, infer_schema_length=None)
    stage = SimpleNamespace(rows=table, name="actor_update", misplaced=None)
    row = first or rows[0]
    started = origin.Origin(kind, row.get("module"), row.get("op"), row, exactly(""))
    return SimpleNamespace(stage=stage, outcomes=outcomes or [], key_data=[], origin=started)


def cause(of: Any, key_data: dict[str, Any] | None = None, world: int = 1) -> Found:
    step: Any = SimpleNamespace(key_data=key_data or {})
    return judged(step, of, world)


def scaled(row: Any) -> bool:
    left = factor.left(row)
    return left is not None and left <= 1.0


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


# a cut at a value


@pytest.mark.parametrize("high", [0.5, 1.5, 5.0])
def test_an_activation_that_is_cut_off_is_clipped(high: float) -> None:
    whole = silu(INPUT)
    said = clip.said(record(whole, np.minimum(whole, high)))
    assert said is not None and f"target's maximum is {high:.6g}" in said
    other = clip.said(record(np.minimum(whole, high), whole))
    assert other is not None and f"benchmark's maximum is {high:.6g}" in other
    below = clip.said(record(-whole, np.maximum(-whole, -high)))
    assert below is not None and f"minimum is -{high:.6g}" in below
    both = clip.said_of_both(record(INPUT, np.clip(INPUT, -high, high)))
    assert both is not None and "both sides" in both and f"{high:.6g}" in both


@pytest.mark.parametrize("strength", [1.0, 1e-3])
def test_another_function_or_a_part_that_is_left_out_is_not_clipped(strength: float) -> None:
    whole = silu(INPUT)
    gelu = INPUT / (1.0 + np.exp(-1.702 * INPUT))
    top = whole == whole.max()
    left_out = np.where((RANDOM.random(whole.shape) < 0.3) | top, 0.0, whole)
    relu = np.maximum(INPUT, 0.0)
    few = np.where(top, 0.9 * whole.max(), np.where(RANDOM.random(whole.shape) < 0.2, 0.0, whole))
    for other in (gelu, left_out, np.maximum(whole, 0.0) * 0.9, np.tanh(whole / 4) * 4, few):
        assert clip.said(record(whole, whole + strength * (other - whole))) is None
    dropped = np.where(RANDOM.random(relu.shape) < 0.3, 0.0, np.where(relu == relu.max(), 0, relu))
    assert clip.said(record(relu, dropped)) is None
    assert clip.said(record(INPUT, INPUT * 0.5)) is None
    assert clip.said(record(INPUT, INPUT * 0.0)) is None


# a factor


def unlike(times: float, cosine: float, b: np.ndarray = INPUT) -> np.ndarray:
    """A tensor of another size at an angle."""
    other = RANDOM.standard_normal(b.shape)
    other -= b * np.sum(other * b) / np.sum(b * b)
    other *= np.linalg.norm(b) / np.linalg.norm(other)
    return times * (cosine * b + np.sqrt(1.0 - cosine**2) * other)


def test_a_small_factor_is_judged_by_what_remains() -> None:
    """With f = 0.16 and e = 0.89, e is next to |f - 1| = 0.84 and the cosine is 0.7."""
    tailed = INPUT**3
    wrong = record(tailed, unlike(0.16, 0.7, tailed))
    assert wrong["error"] < 0.84 * 1.1 and not scaled(wrong)
    wrong = record(INPUT, unlike(0.16, 0.7))  # extremes look alike
    assert not scaled(wrong | {"residual": 0.16 * 0.7})
    assert not scaled(wrong | {"error_kind": "tensor", "error_uncertainty": 0.0})
    right = record(INPUT, 0.16 * INPUT)
    assert scaled(right | {"residual": 1e-6})
    for error in (0.84, 0.84 * 1.15, 0.84 * 0.85):  # as sketches are uncertain
        assert scaled(right | {"error": error})
    assert scaled(right | {"error_kind": "tensor", "error_uncertainty": 0.0})


def test_sketches_tell_a_factor_from_what_is_nearly_one() -> None:
    """A part of the size of the floor, in a direction with a large share along the benchmark."""
    size = 2e-5
    moved = INPUT * (1 - size) + 0.3 * size * (unlike(1.0, 0.0))
    nearly = record(INPUT, moved)
    assert scaled(nearly), "error and norms alone cannot tell"
    assert not scaled(nearly | {"residual": 0.3 * size})
    assert scaled(record(INPUT, INPUT * (1 - size), residual=3e-6))


def test_what_is_turned_around_is_a_multiple() -> None:
    turned = record(INPUT, -INPUT, residual=1e-7)
    assert scaled(turned) and cause(finding([turned])).cause == "constant_factor"
    assert "-1 times" in cause(finding([turned])).said[-1]
    assert not scaled(record(INPUT, -INPUT, residual=0.1))
    clipped = record(INPUT, -INPUT, residual=1e-7, slot="grad_clipped", phase=execution.GRADIENTS)
    assert cause(finding([clipped], origin.CLIPPING)).cause == "constant_factor"


@pytest.mark.parametrize("size", [0.5, 1.7])
def test_a_multiple_may_be_turned_around(size: float) -> None:
    turned = record(INPUT, -size * INPUT, residual=1e-7)
    for error in (0.93 * (1 + size), 1.07 * (1 + size)):  # as sketches are uncertain
        assert scaled(turned | {"error": error})
    assert f"{-size:g} times" in cause(finding([turned])).said[-1]
    assert not scaled(record(INPUT, unlike(size, -0.8), residual=0.6 * size))
    unseen = {k: v for k, v in turned.items() if k != "residual"}
    assert not scaled(unseen), "norms and an error alone do not tell"


def micro_batches(*factors: float) -> list[dict[str, Any]]:
    return [
        record(
            INPUT, f * INPUT,
            micro_batch=i, phase=execution.BACKWARD, slot="input", module="lm_head",
        )
        for i, f in enumerate(factors)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("factors", "found"),
    [((2.0,), "constant_factor"), ((0.16, 0.16, 0.16), "constant_factor"),
     ((0.16, 0.3, 0.04), "unknown"), ((1.001, 1.0002), "unknown"),
     ((1.00003, 1.000031), "constant_factor")],
)  # fmt: skip
def test_a_factor_is_the_same_in_all_micro_batches(factors: tuple[float, ...], found: str) -> None:
    rows = micro_batches(*factors)
    of_loss = cause(finding(rows, origin.LOSS))
    assert of_loss.cause == found, of_loss
    assert ("by micro-batch" in of_loss.said[0]) == (len(factors) > 1)
    assert cause(finding([{**row, "direction": "backward"} for row in rows])).cause == found


def test_a_rounding_of_the_loss_rounds_in_all_micro_batches() -> None:
    bits = INPUT.astype(np.float32).view(np.uint32).astype(np.uint64)
    even = (bits >> 16) & 1
    kept = ((bits + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32)
    rounded = kept.view(np.float32).astype(float)
    same = {"phase": execution.BACKWARD, "slot": "input", "module": "lm_head", "floor": 1e-6}
    loss = record(INPUT, rounded, phase=execution.LOSS, slot="loss", index="pg_loss")
    rows = [record(INPUT, rounded, **same), record(INPUT, INPUT * 1.0008, micro_batch=1, **same)]
    assert cause(finding([loss, rows[0]], origin.LOSS)).cause == "rounding_order"
    assert cause(finding([loss, *rows], origin.LOSS)).cause == "unknown"


# a router


def routed(*outputs: tuple[str, bool]) -> Found:
    """A router with these outputs: dtype, and whether it differs."""
    rows = [
        record(
            INPUT, INPUT + RANDOM.standard_normal(INPUT.shape), index=str(i), beyond=beyond,
            dtype_benchmark=dtype, module="mlp.gate", op="TopKRouter",
        )
        for i, (dtype, beyond) in enumerate(outputs)
    ]  # fmt: skip
    first = next(row for row in rows if row["beyond"])
    return cause(finding(rows, first=first))


def test_a_routers_choice_is_told_from_its_weights_by_what_they_are() -> None:
    number, whole = "torch.float32", "torch.int64"
    found, said = routed((number, False), (number, True), (whole, False))
    said = said[-1:]
    assert found == "routing" and "weighs experts otherwise: its output 1" in said[0]
    assert "0 (scores or weights) and 2 (the choice, whole numbers) agree" in said[0]
    said = routed((number, False), (number, True), (whole, True)).said[-1:]
    assert (
        "chose other experts" in said[0] and "2 (the choice, whole numbers) differ too" in said[0]
    )
    said = routed((number, False), (whole, True)).said[-1:]
    assert "chose other experts: its output 1" in said[0]


def test_experts_whose_output_agrees_are_not_said_to_differ() -> None:
    inside: Any = record(INPUT, unlike(1.1, 0.9), slot="input", module="experts.act_fn", op="SiLU")
    whole = {"module": "experts", "op": "Experts", "call_id": 3}
    choice = record(
        INPUT, INPUT, slot="input", dtype_benchmark="torch.int64", beyond=False, **whole
    )
    own = record(INPUT, INPUT, beyond=False, **whole)
    for differs in (False, True):
        rows = [choice, inside, own | {"beyond": differs}]
        given = finding(rows, origin.GLUE, inside)
        given.origin = origin.Origin(origin.GLUE, "experts", "Experts", inside, exactly(""))
        found = cause(given)
        assert found.cause == "unknown"
        assert ("its own output agrees" in " ".join(found.said)) == (not differs)


# an update that was given other log-probs


def key_data(name: str, error: float) -> Difference:
    return Difference(name, 0, error, error, error, 8, 0, 0, "s", 0, 0.5)


@pytest.mark.parametrize(
    ("own", "old", "found"),
    [(0.0, 0.01, "data"), (1e-3, 0.01, "data"), (0.05, 0.0, "unknown"),
     (None, None, "unknown"), (None, 0.0, "unknown"),
     (None, 0.01, "data"), (0.0, 0.0, "unknown"), (0.0, 1e-6, "unknown")],
)  # fmt: skip
def test_another_ratio_comes_from_the_log_probs_that_differ(
    own: float | None, old: float | None, found: str
) -> None:
    ratio = record(INPUT, INPUT, phase=execution.LOSS, slot="loss", index="ppo_kl", beyond=True)
    ratio |= {"max_benchmark": 0.0, "max_target": -7e-3}
    gradient = record(INPUT, unlike(1.3, 0.8), phase=execution.BACKWARD, slot="input")
    rows = [ratio, gradient]
    of: dict[str, Any] = {}
    if own is not None:
        of["update_log_probs"] = key_data("update_log_probs", own)
    if old is not None:
        of["given_old_log_probs"] = key_data("given_old_log_probs", old)
        of["old_log_probs"] = key_data("old_log_probs", old)
    outcomes = [] if own is None else [Outcome("update_log_probs", own, 0.03)]
    said = cause(finding(rows, origin.LOSS, gradient, outcomes), of)
    assert said.cause == found, said


def test_gradients_of_a_loss_that_are_unrelated_are_no_labels() -> None:
    gradient = record(INPUT, unlike(1.0, 0.0), phase=execution.BACKWARD, slot="input")
    assert cause(finding([gradient], origin.LOSS)).cause == "unknown"


# tokens that are left out


def log_probs(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(b := -rng.random(12), b.copy()) for _ in range(4)]


def test_tokens_that_all_have_one_value_are_left_out() -> None:
    pairs = log_probs(np.random.default_rng(1))
    for _, t in pairs[1:]:
        t[-1] = 0.0
    found = subset.fit(pairs)
    assert found is not None and (found.differ, found.tokens, found.value) == (3, 48, 0.0)
    assert found.said.startswith("3 of 48 tokens differ, and all of these are 0 on the target")
    pairs[0][1][5] -= 0.3  # one that is not: no law of all that differ
    assert subset.fit(pairs) is None
    assert subset.counted(pairs) == "4 of 48 tokens differ"


def test_all_tokens_or_one_alone_are_no_tokens_left_out() -> None:
    pairs = log_probs(np.random.default_rng(1))
    assert subset.fit([(b, np.zeros_like(b)) for b, _ in pairs]) is None
    pairs[0][1][3] = 0.0
    assert subset.fit(pairs) is None
    assert subset.fit([]) is None


# clipping


def clipped(*factors: float, floor: float = 1e-5) -> Found:
    """The cause where gradients are these multiples of the benchmark's after clipping."""
    rows = [
        record(
            INPUT, f * INPUT, slot="grad_clipped", phase=execution.GRADIENTS, module=f"m{i}",
            beyond=f != 1.0, floor=floor,
        )
        for i, f in enumerate(factors)
    ]  # fmt: skip
    return cause(finding(rows, origin.CLIPPING))


@pytest.mark.parametrize("factors", [(0.5, 1, 1), (2, 2, 1, 1, 1), (0.999, 1), (1.7, 1.7, 1.7, 1)])
def test_clipping_by_another_norm_leaves_no_gradient_out(factors: tuple[float, ...]) -> None:
    found = clipped(*factors)
    assert found.cause == "constant_factor", found
    others = factors.count(1)
    assert any(f"{others} other gradient" in str(line) for line in found.said)
    assert not any("another norm" in str(line) for line in found.said)


@pytest.mark.parametrize("factors", [(0.5, 0.5, 0.5), (2, 2), (0.999, 0.999, 0.999)])
def test_clipping_by_another_norm_is_one_factor_of_all(factors: tuple[float, ...]) -> None:
    found = clipped(*factors)
    assert found.cause == "optimizer"
    assert not any("agree" in str(line) for line in found.said)


def test_a_gradient_whose_floor_hides_the_factor_is_not_left_out() -> None:
    assert clipped(1.001, 1.001, 1, floor=6e-4).cause == "optimizer"


def test_gradients_that_are_clipped_one_by_one_have_no_common_factor() -> None:
    def said(*factors: float) -> str:
        rows = [
            record(
                INPUT, f * INPUT, slot="grad_clipped", phase=execution.GRADIENTS, module=f"m{i}"
            )
            for i, f in enumerate(factors)
        ]  # fmt: skip
        return cause(finding(rows, origin.CLIPPING)).said[-1]

    assert "all 4 gradients that differ after clipping are 2 times" in said(2, 2, 2, 2)
    apart = said(1.8, 10.6, 10.6, 10.6, 3.0, 7.5)
    assert "the 6 gradients after clipping that differ are 1.8 to 10.6 times" in apart
    assert "not by one factor" in apart
    most = said(1.8, 10.6, 10.6, 10.6, 10.6)
    assert "1.8 to 10.6 times" in most and "4 of them 10.6 times" in most
