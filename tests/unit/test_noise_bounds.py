"""How far may two correct devices be apart?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import sketch_floors
from rlprobe.judge import noise, noise_updates, roundoff
from rlprobe.judge.noise_updates import poisson_quantile
from tests.unit.noise_rows import BF16, FP16, FP32, chain, record


def bounds(rows: list[dict[str, Any]], **options: Any) -> dict[str, float]:
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None), **options)
    return dict(table.select("name", "noise").iter_rows())


def test_the_bound_grows_with_the_root_of_depth() -> None:
    found = bounds(chain(16))
    growth = found["layers.15.out"] / found["layers.0.out"]
    assert growth == pytest.approx(4.0, rel=0.01)


def test_the_bound_grows_with_the_root_of_the_reduction() -> None:
    narrow, wide = (bounds(chain(1, width=w))["layers.0.out"] for w in (64, 4096))
    assert wide / narrow == pytest.approx(8.0, rel=0.05)


def test_a_coarse_format_rounds_once_and_sums_in_fp32() -> None:
    narrow, wide = (bounds(chain(1, width=w, dtype=BF16))["layers.0.out"] for w in (64, 4096))
    assert wide == pytest.approx(narrow, rel=0.01)  # the stored rounding dominates
    assert narrow > 1000 * bounds(chain(1))["layers.0.out"]


def test_what_is_equal_on_both_sides_adds_nothing() -> None:
    rows = chain(8)
    for row in rows[:-3]:
        row.update(error=0.0, **{f"{n}_diff": 0.0 for n in ("max", "min", "mean", "norm")})
    assert bounds(rows)["layers.7.out"] == pytest.approx(bounds(chain(1))["layers.0.out"], rel=0.5)
    assert bounds(rows)["layers.7.out"] < 0.5 * bounds(chain(8))["layers.7.out"]


EQUAL = {"error": 0.0, **{f"{n}_diff": 0.0 for n in ("max", "min", "mean", "norm")}}


DIFFERS = {"error": 1e-3, **{f"{n}_diff": 1e-3 for n in ("max", "min", "mean", "norm")}}


@pytest.mark.parametrize("first", [EQUAL, DIFFERS])
def test_an_operation_counts_by_whichever_of_its_results_differs(first: dict[str, Any]) -> None:
    """A router's logits may be equal where the weights that it makes of them are not."""
    rows = chain(1, dtype=BF16)
    for row in rows:
        row.update(EQUAL)
    rows[-1].update(first)
    router = {"module": "layers.0", "dtype": BF16}
    rows.append(record(3, "layers.0.weights", shape=[16, 2], index="1", error=1e-3, **router))
    rows.append(record(4, "layers.0.experts", shape=[16, 2], index="2", error=1e-3, **router))
    rows += [{**row, "order": 5 + n} for n, row in enumerate(chain(2)[3:])]
    behind = bounds(rows)["layers.1.out"]
    assert behind > 100 * bounds(chain(2))["layers.1.out"]
    once = bounds([*rows[:4], *rows[5:]])["layers.1.out"]
    assert behind == pytest.approx(once, rel=1e-6), "an operation counts once"


@pytest.mark.parametrize(("kind", "counts"), [("tensor", True), ("sketch", False)])
def test_a_difference_that_statistics_do_not_show_counts_where_tensors_show_it(
    kind: str, counts: bool
) -> None:
    """One round-off in a few elements leaves max, min, mean and norm as they are."""
    rows = chain(1)
    for row in rows:
        row.update({f"{n}_diff": 0.0 for n in ("max", "min", "mean", "norm")}, error_kind=kind)
        row["error"] = 1.1e-7 if row is rows[-1] else 0.0
    found = bounds(rows)["layers.0.out"]
    assert found >= 3e-7
    assert (found > 4e-7) == counts


def test_the_bound_holds_for_real_fp32_sums_in_another_order() -> None:
    generator = np.random.default_rng(0)
    a = b = generator.standard_normal((64, 256)).astype(np.float32)
    rows, worst = chain(6, width=256), []
    for layer in range(6):
        w = (generator.standard_normal((256, 256)) / 16).astype(np.float32)
        a = a @ w.T
        b = (
            (b[:, ::-1] @ w.T[::-1])
            if layer % 2
            else b[:, :128] @ w.T[:128] + b[:, 128:] @ w.T[128:]
        )
        error = float(np.linalg.norm(b.astype(float) - a) / np.linalg.norm(a.astype(float)))
        rows[3 * layer + 2]["error"] = error
        worst.append(error)
    found = bounds(rows)
    ratios = [error / found[f"layers.{layer}.out"] for layer, error in enumerate(worst)]
    assert 0 < max(ratios) < 0.7


def test_tf32_factors_widen_products_only() -> None:
    plain, coarse = (bounds(chain(1), products=p)["layers.0.out"] for p in (0.0, 2.0**-11))
    assert coarse > 50 * plain


def test_integers_have_no_round_off() -> None:
    rows = [
        record(0, "ids", slot="input", dtype="torch.int64", error=1e-3, module="m"),
        record(1, "same", slot="input", dtype="torch.int64", error=0.0, module="m", index="1"),
    ]
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert table.get_column("ratio").to_list() == [float("inf"), 0.0]


def test_a_sketch_resolves_no_better_than_it_can() -> None:
    rows = [record(0, "x", error_kind="sketch", error=2e-7, op="Embedding", module="e",
                   **{f"{n}_diff": 0.0 for n in ("max", "min", "mean", "norm")})]  # fmt: skip
    assert bounds(rows)["x"] == pytest.approx(sketch_floors.DEVICES)


def test_a_loss_near_zero_is_judged_by_its_terms() -> None:
    rows = [
        *chain(2),
        record(6, "loss", slot="loss", op="loss", dtype="float", shape=None, module=None,
               max_benchmark=None, max_target=None, value_benchmark="4e-08", value_target="3e-07",
               error=6.5, error_kind="statistics"),
    ]  # fmt: skip
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert table.get_column("ratio")[-1] < 1
    rows[-1].update(value_target="0.01", error=250_000.0)
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert table.get_column("ratio")[-1] > 100


def parameter(
    order: int, name: str, slot: str, error: float, norm: float, size: int = 4096, **more: Any
) -> dict[str, Any]:
    row = record(order, f"{name}.{slot}", module=name, slot=slot, index="weight", op="Parameter",
                 direction="update", shape=[size], error=error, **more)  # fmt: skip
    return row | {"norm_benchmark": norm, "norm_target": norm, "norm_diff": norm * 1e-9}


def test_flipped_signs_of_adam_are_no_alarm_and_a_learning_rate_is() -> None:
    n, rate = 4096, 1e-3
    generator = np.random.default_rng(1)
    gradient = generator.standard_normal(n)
    other = gradient * (1 + 2e-6 * generator.standard_normal(n))
    other += 2e-6 * generator.standard_normal(n)
    steps = [rate * g / (abs(g) + 1e-8) for g in (gradient, other)]
    steps[1][0] = -steps[1][0]  # a flip, which happens to one element in a million
    norm = float(np.linalg.norm(steps[0]))
    error = float(np.linalg.norm(steps[1] - steps[0]) / norm)
    assert error > 0.01
    rows = [
        *chain(2),
        parameter(6, "p", "grad_clipped", 2.8e-6, float(np.linalg.norm(gradient))),
        parameter(7, "q", "grad_clipped", 2.8e-6, 100.0),
        parameter(8, "p", "change", error, norm),
        parameter(9, "q", "change", 1e-6, norm),
    ]
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert table.get_column("ratio")[-2] < 1
    rows[-2].update(norm_target=norm * 1.01, norm_diff=norm * 0.01, error=0.01)
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert table.get_column("ratio")[-2] > 1


def test_sgd_passes_the_gradients_error_on() -> None:
    rows = [*chain(2)]
    for number, norm in enumerate((1.0, 3.0, 0.2)):
        rows.append(parameter(6 + number, f"p{number}", "grad_clipped", 2e-6, norm))
    for number, norm in enumerate((1.0, 3.0, 0.2)):
        rows.append(parameter(9 + number, f"p{number}", "change", 1e-3, norm * 1e-3))
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert (table.get_column("ratio").tail(3) > 10).all()


def test_a_bias_whose_terms_cancel_keeps_the_error_of_the_terms() -> None:
    def rows(norm: float) -> list[dict[str, Any]]:
        arriving = record(6, "back", module="layers.1", direction="backward", slot="input",
                          norm_benchmark=1.0)  # fmt: skip
        bias = parameter(7, "layers.1", "grad", 1e-5, norm, size=64)
        return [*chain(2), arriving, bias | {"index": "bias"}]

    assert bounds(rows(1e-3))["layers.1.grad"] > 100 * bounds(rows(1.0))["layers.1.grad"]


@pytest.mark.parametrize("mean", [0.0, 1e-7, 0.01, 0.5, 3.0, 20.0, 49.0])
def test_poisson_quantile_against_the_sum_of_its_terms(mean: float) -> None:
    k = int(poisson_quantile(mean, 1e-5)[0])
    terms = [np.exp(-mean)]
    for i in range(1, 400):
        terms.append(terms[-1] * mean / i)
    beyond = [sum(terms[i + 1 :]) for i in range(k + 1)]
    assert beyond[k] <= 1e-5 * (1 + 1e-6)
    assert k == 0 or beyond[k - 1] > 1e-5 * (1 - 1e-6)


def test_poisson_quantile_of_large_means_is_close_and_never_too_small() -> None:
    for mean in (60.0, 1e3, 1e6):
        k = poisson_quantile(mean, 1e-5)[0]
        normal = mean + 4.27 * np.sqrt(mean)
        assert normal * 0.999 <= k < normal + 0.6 * np.sqrt(mean) + 2 * np.log(1e5)


def test_every_process_has_its_own_chain() -> None:
    rows = chain(2) + [row | {"rank": 1} for row in chain(2)]
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    first, second = table.filter(pl.col("rank") == 0), table.filter(pl.col("rank") == 1)
    assert first.get_column("noise").equals(second.get_column("noise"))


def test_an_empty_table_stays_empty() -> None:
    table = pl.DataFrame(chain(1), infer_schema_length=None).clear()
    assert noise.annotate(table).height == 0


def test_unit_round_offs_are_halves_of_the_formats_epsilons() -> None:
    assert roundoff.UNIT[FP32] == np.finfo(np.float32).eps / 2
    assert roundoff.UNIT["torch.float16"] == np.finfo(np.float16).eps / 2
    assert roundoff.UNIT["torch.float64"] == np.finfo(np.float64).eps / 2


def test_what_was_given_widens_losses_and_the_backward_pass_only() -> None:
    rows = [*chain(2), record(90, "loss.loss.0.debug", slot="loss", direction="update", op=None)]
    rows.append(record(95, "layers.1.back", module="layers.1", direction="backward"))
    losses = pl.DataFrame({"rank": [0], "name": ["loss.loss.0.debug"], "inherited": [0.25]})
    plain = bounds(rows)
    widened = bounds(rows, inherited=noise.Inherited(losses, {(0, 0): 0.1}))
    assert widened["loss.loss.0.debug"] == pytest.approx(plain["loss.loss.0.debug"] + 0.25)
    assert widened["layers.1.back"] == pytest.approx(0.2, rel=1e-3)
    assert widened["layers.1.out"] == plain["layers.1.out"]


@pytest.mark.parametrize(("factor", "seen"), [(1.0, False), (1.012, True), (0.98, True)])
def test_a_factor_of_a_bf16_product_is_told_from_its_rounding(factor: float, seen: bool) -> None:
    draw = np.random.default_rng(5)
    exact = draw.standard_normal(16 * 64).astype(np.float32)

    def rounded(values: np.ndarray) -> np.ndarray:  # round to nearest even at 8 bits
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)

    split = exact * np.float32(draw.random())
    one = rounded(exact)
    other = rounded(factor * (rounded(split) + rounded(exact - split)))
    rows = [r | {"error": 0.0} if r["slot"] == "input" else r for r in chain(1, dtype=BF16)]
    norms = [float(rounded(np.array([np.linalg.norm(x)]))[0]) for x in (one, other)]
    error = float(np.linalg.norm(other - one)) / norms[0]
    rows[-1] |= {"norm_benchmark": norms[0], "norm_target": norms[1], "error": error,
                 "norm_diff": norms[1] - norms[0], "error_kind": "sketch",
                 "max_benchmark": float(one.max()), "min_benchmark": float(one.min())}  # fmt: skip
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    ratio = table.filter(pl.col("name") == "layers.0.out").item(0, "ratio")
    assert (ratio > 1) == seen
    # neither where the inputs differ, which may have any direction
    rows[0] |= {"error": 1e-3}
    table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
    assert table.filter(pl.col("name") == "layers.0.out").item(0, "ratio") < 1.4


def test_few_large_elements_carry_the_norm() -> None:
    rows = [r | {"error": 0.0} if r["slot"] == "input" else r for r in chain(1, dtype=BF16)]
    moved = rows[-1] | {"norm_diff": 0.015, "norm_benchmark": 1.0, "error": 0.015}
    ratios = []
    for largest in (0.05, 1.0):
        rows[-1] = moved | {"max_benchmark": largest, "min_benchmark": -largest}
        table = noise.annotate(pl.DataFrame(rows, infer_schema_length=None))
        ratios.append(table.item(-1, "ratio"))
    assert ratios[0] > 1 > ratios[1]


def rotary(dtype: str, reach: float, width: int = 16) -> float:
    """The bound of a table of sines whose largest position is ``reach``."""
    common: dict[str, Any] = {"module": "rotary", "op": "Qwen2RotaryEmbedding"}
    positions = {"dtype": "torch.int64", "shape": [2, 8], "index": "1", "error": 0.0}
    rows = [
        record(0, "x", slot="input", dtype=dtype, **common),
        record(1, "positions", slot="input", **common, **positions)
        | {"max_benchmark": reach, "norm_diff": 0.0, "max_diff": 0.0},
        record(2, "sines", dtype=dtype, shape=[2, 8, width], **common),
    ]
    return bounds(rows)["sines"]


def test_a_rotary_table_in_16_bits_is_rounded_once() -> None:
    assert rotary(BF16, 1100.0) == pytest.approx(roundoff.UNIT[BF16], rel=0.01)
    assert rotary(BF16, 1100.0, width=64) > 4 * rotary(BF16, 1100.0), "it turned its inputs itself"


FREQUENCIES = (10_000.0 ** (-np.arange(32) / 32)).astype(np.float32)


def rounded(x: Any, dtype: str) -> Any:
    """Numbers as a format has them, to nearest."""
    if dtype == FP16:
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float64)
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return bits.view(np.float32).astype(np.float64)


def cosines(frequencies: Any, dtype: str, reach: int, wide: bool = False) -> Any:
    """A table in a format of 16 bits; its angles are computed in fp32, or in fp64."""
    places = np.arange(reach + 1, dtype=np.float64 if wide else np.float32)
    return rounded(np.cos(np.outer(places, frequencies.astype(places.dtype))), dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("reach", [47, 1000, 20_000])
def test_a_rotary_table_in_16_bits_differs_where_fp32_falls_the_other_way(
    dtype: str, reach: int
) -> None:
    right = cosines(FREQUENCIES, dtype, reach)
    allowed = rotary(dtype, float(reach), 64 // 8)

    def error(other: Any) -> float:
        return float(np.linalg.norm(other - right) / np.linalg.norm(right))

    # more exact angles, and frequencies that another device's power is off by
    assert error(cosines(FREQUENCIES, dtype, reach, wide=True)) < allowed
    off = FREQUENCIES * np.float32(1 + 2.0**-23)
    assert error(cosines(off, dtype, reach)) < allowed
    # frequencies in the format of the model, another base, a place too far
    for wrong in (rounded(FREQUENCIES, dtype).astype(np.float32), FREQUENCIES**1.001):
        assert error(cosines(wrong, dtype, reach)) > allowed
    late = np.roll(cosines(FREQUENCIES, dtype, reach), 1, axis=0)
    assert error(late) > allowed


def test_a_rotary_table_differs_by_what_large_angles_round_to() -> None:
    assert rotary(FP32, 0.0) == pytest.approx(8 * roundoff.FP32, rel=0.01)
    assert rotary(FP32, 30_000.0) == pytest.approx(30_000 * roundoff.FP32, rel=0.01)


def test_what_a_product_hands_on_is_rounded_as_its_factors_are() -> None:
    """Autocast casts a gradient that bf16 products made to the format of the module's input."""
    found = {}
    for given in (FP32, BF16):
        rows = [
            record(0, "w", slot="parameters", index="weight", shape=[64, 64], module="m", error=0.0,
                   **dict.fromkeys(("max_diff", "min_diff", "mean_diff", "norm_diff"), 0.0)),
            record(1, "back.in", direction="backward", slot="input", module="m", dtype=given),
            record(2, "back.out", direction="backward", slot="output", module="m"),
            record(3, "grad", direction="update", slot="grad", index="weight", shape=[64, 64],
                   module="m"),
        ]  # fmt: skip
        found[given] = bounds(rows)
    assert found[BF16]["back.out"] > 1000 * found[FP32]["back.out"]
    assert found[BF16]["grad"] > 1000 * found[FP32]["grad"]


def test_a_format_that_was_not_asked_for_widens_nothing() -> None:
    rows = [
        record(0, "w", slot="parameters", index="weight", shape=[64, 64], module="m"),
        record(1, "in", slot="input", module="m"),
        record(2, "out", module="m", dtype_target=BF16),
    ]
    fine, coarse = (bounds(rows, one_precision=alike)["out"] for alike in (True, False))
    assert coarse > 1000 * fine


def test_signs_of_a_bias_are_as_uncertain_as_its_bound() -> None:
    """Of a key's bias a part may cancel in full, which its norm and measured error do not show."""
    row = {
        "_row": 0, "norm_benchmark": 1e-3, "gradient_norm": 0.03, "gradient_error": 0.016,
        "gradient_noise": 0.31, "weight": 1.0, "gradient_u": 2.0**-24, "updates": 1,
        "gradient_kind": "sketch", "gradient_same": False, "rounding": 0.0,
    }  # fmt: skip
    small, fused, matrix = (
        noise_updates._change_bounds(
            pl.DataFrame([{**row, "size": size, "vector": vector}]), linear=False
        )
        for size, vector in ((24.0, True), (144.0, True), (4608.0, False))
    )
    assert small["change_model"].item() > 1.0, "six of 24 signs were seen to flip"
    assert fused["change_model"].item() > 0.8, "a third of them is the key's"
    assert matrix["change_model"].item() < 0.5
    assert small["change_norm"].item() < 0.5, "a factor is seen all the same"


@pytest.mark.parametrize(
    ("stored", "given", "rounded"),
    [
        ((FP32, BF16), (BF16, BF16), True),  # one back end keeps fp32 copies, both compute in bf16
        ((BF16, FP32), (BF16, BF16), True),
        ((FP32, BF16), (FP32, FP32), False),  # a module that was loaded in another format
        ((FP32, BF16), (FP32, BF16), False),  # and computes in it too
        ((FP32, FP32), (BF16, BF16), False),  # rounded weights that say they are fp32
    ],
)
def test_weights_that_are_kept_otherwise_differ_as_what_is_computed_with_them(
    stored: tuple[str, str], given: tuple[str, str], rounded: bool
) -> None:
    def of(formats: tuple[str, str]) -> dict[str, str]:
        return {"dtype_benchmark": formats[0], "dtype_target": formats[1]}

    rows = [
        record(0, "ids", slot="input", module="e", dtype="torch.int64", error=0.0),
        record(1, "w", slot="parameters", index="weight", shape=[64, 8], module="e") | of(stored),
        record(2, "out", module="e") | of(given),
    ]
    bound = bounds(rows, one_precision=True)["w"]
    assert (bound > roundoff.UNIT[BF16]) == rounded, bound
