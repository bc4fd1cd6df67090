"""Where do training and the engine part: is round-off left alone, and a fault named first?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from rlprobe.judge import engine

LAYERS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm")


def table(errors: dict[str, Any], **changes: Any) -> pl.DataFrame:
    """A prompt's pass and two generated tokens', with the errors of some records."""
    rows = []
    for number, tokens in enumerate((5, 1, 1)):
        for order, module in enumerate(LAYERS):
            error = errors.get(f"{number} {module}", 3e-7)
            rows.append(
                {
                    "step": 0, "rank": 0, "slot": "output", "module": module, "error": error,
                    "op": "Layer", "index": "0", "norm_benchmark": 8.0 * tokens**0.5,
                    "order_benchmark": 10 * number + order, "error_kind": "tensor",
                    "name_benchmark": f"Module.{module}.Layer.forward.{number}.output.0",
                    "shape_benchmark": [tokens, 64], "shape_target": [2, 9, 64],
                    "status": "matched",
                    "dtype_benchmark": "torch.float32", "dtype_target": "torch.float32",
                }
                | changes
            )  # fmt: skip
    return pl.DataFrame(rows)


def test_round_off_is_left_alone() -> None:
    prefill, decode = engine.parts(table({}))
    assert (prefill.passes, prefill.records, decode.passes, decode.records) == (1, 4, 2, 8)
    assert prefill.first is None and decode.beyond == 0
    assert 0.1 < prefill.worst == decode.worst < 1
    assert "none beyond" in str(prefill)


@pytest.mark.parametrize(("size", "parts"), [(1, False), (8, False), (64, True)])
def test_a_gate_that_came_out_near_zero_is_held_against_its_usual_size(
    size: int, parts: bool
) -> None:
    """The same round-off is a large part of one small number, and of 64 of them it is a fault."""
    rows = table({"2 model.layers.1": 1e-3}, shape_benchmark=[1, size], norm_benchmark=1.0)
    small = (pl.col("error") == 1e-3).cast(pl.Int8)
    rows = rows.with_columns(norm_benchmark=pl.lit(1.0) - 0.9999 * small)
    (found,) = engine.parts(rows)
    assert (found.first is not None) == parts, str(found)


@pytest.mark.parametrize(
    ("width", "parts"), [(64, True), (32, True), (16, False), (128, True)], ids=str
)
def test_a_ranks_piece_may_have_more_than_its_share_of_round_off(width: int, parts: bool) -> None:
    """One head's numbers differ by more than all heads' together; padding is no piece."""
    allowed = 16.0 * 2.0**-24 * math.sqrt(3)
    rows = table({"1 model.layers.1": 1.9 * allowed}, shape_benchmark=[1, width])
    (found,) = engine.parts(rows)
    assert (found.first is not None) == parts, str(found)


def test_a_gate_of_its_usual_size_is_judged_as_it_is() -> None:
    rows = table({"2 model.layers.1": 1e-3}, shape_benchmark=[1, 1], norm_benchmark=1.0)
    (found,) = engine.parts(rows)
    assert found.first is not None and found.first[1] == "model.layers.1"


@pytest.mark.parametrize(
    "lay", [lambda n: [n, 64], lambda n: [1, n, 64]], ids=["[tokens, …]", "[rows, tokens, …]"]
)
def test_passes_of_one_token_are_decoding_however_they_are_laid_out(
    lay: Callable[[int], list[int]],
) -> None:
    rows = table({})
    shapes = [lay(tokens) for tokens, _ in rows["shape_benchmark"]]
    shapes[2] = [shapes[2][-2], 4, 16]  # heads stand between, in attention
    prefill, decode = engine.parts(rows.with_columns(shape_benchmark=pl.Series(shapes)))
    assert (prefill.passes, prefill.records, decode.passes, decode.records) == (1, 4, 2, 8)


def test_a_fault_of_decoding_is_named_where_it_begins_in_the_model() -> None:
    wrong = {"1 model.norm": 0.1, "2 model.layers.1": 0.2, "2 model.norm": 0.3}
    prefill, decode = engine.parts(table(wrong))
    assert prefill.first is None
    assert decode.beyond == 2 and decode.first is not None
    assert decode.first[1] == "model.layers.1" and decode.first[3] == 0.2
    assert "first at model.layers.1" in str(decode)


@pytest.mark.parametrize("error", [math.nan, None])
def test_what_is_not_finite_is_beyond(error: float | None) -> None:
    rows = table({"0 model.layers.0": error}).with_columns(
        status=pl.when(pl.col("error").is_null() | pl.col("error").is_nan())
        .then(pl.lit("nonfinite"))
        .otherwise("status")
    )
    prefill, _ = engine.parts(rows)
    assert prefill.first is not None and prefill.first[1] == "model.layers.0"


@pytest.mark.parametrize(("dtype", "allowed"), [("torch.bfloat16", True), ("torch.float16", False)])
def test_the_coarser_side_says_what_round_off_is(dtype: str, allowed: bool) -> None:
    prefill, _ = engine.parts(table({"0 model.norm": 5e-2}, dtype_benchmark=dtype))
    assert (prefill.first is None) == allowed


def test_a_type_without_a_unit_is_not_judged() -> None:
    assert engine.parts(table({"0 model.norm": 1.0}, dtype_target="torch.int64")) == []


def held(module: str, error: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "step": 0, "rank": 0, "slot": "parameters", "module": module, "error": error,
        "order_benchmark": LAYERS.index(module), "error_kind": "tensor", "status": "matched",
        "dtype_benchmark": "torch.float32", "dtype_target": "torch.float32",
    } | changes  # fmt: skip


def test_weights_are_the_trainers_or_named() -> None:
    same = pl.DataFrame([held(name, 0.0) for name in LAYERS])
    (found,) = engine.weights(same)
    assert (found.compared, found.first, found.wrong, found.left) == (4, None, (), 0)
    stale = [held(name, 0.03 if "layers" in name else 0.0, step=1) for name in LAYERS]
    good, bad = engine.weights(pl.concat([same, pl.DataFrame(stale)]))
    assert good.first is None and bad.first == ("model.layers.0", 0.03)
    assert bad.wrong == ("model.layers.0", "model.layers.1") and "2 modules" in str(bad)


@pytest.mark.parametrize(
    ("row", "wrong", "left"),
    [
        # sent to an engine of a shorter format, they are rounded once
        ({"error": 2e-3, "dtype_benchmark": "torch.bfloat16"}, False, 0),
        ({"error": 2e-2, "dtype_benchmark": "torch.bfloat16"}, True, 0),
        ({"error": 3e-7, "error_kind": "sketch"}, False, 0),
        ({"error": 3e-7}, True, 0),
        ({"error": 1e-4, "error_kind": "sketch"}, True, 0),
        ({"error": None, "status": "nonfinite"}, True, 0),
        ({"error": None, "error_kind": None, "status": "shape"}, False, 1),
        ({"error": None, "error_kind": None, "status": "benchmark_only"}, False, 1),
    ],
)
def test_what_is_allowed_between_weights(row: dict[str, Any], wrong: bool, left: int) -> None:
    (found,) = engine.weights(
        pl.DataFrame([held("model.norm", None) | row], schema_overrides={"error": pl.Float64})
    )
    assert ((found.first is not None), found.left) == (wrong, left)
