"""What do two tensors say about their difference?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlprobe.refine.look import look

RANDOM = np.random.default_rng(0)
B = RANDOM.standard_normal((1, 50, 64)).astype(np.float32)
NOISE = (1e-7 * RANDOM.standard_normal(B.shape)).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


Law = tuple[Callable[[], np.ndarray], str | None, str]
LAWS: dict[str, Law] = {
    "bf16": (lambda: bfloat16(B), "rounding_order", "bfloat16"),
    "bf16 then fp32 noise": (lambda: bfloat16(B) + NOISE, "rounding_order", "bfloat16"),
    "fp16": (lambda: B.astype(np.float16), "rounding_order", "float16"),
    "factor": (lambda: 1.001 * B + NOISE, "constant_factor", "1.001 times"),
    "heads": (
        lambda: B.reshape(50, 4, 16)[:, ::-1].reshape(B.shape), "layout", "blocks of 16 in the "
        "order 3, 2, 1, 0",
    ),
    "channels moved round": (lambda: np.roll(B, 8, -1), "layout", "moved round by 56"),
    "rows": (lambda: B[:, ::-1], "row_order", "50 of 50 rows"),
    "norm": (lambda: B * (1 + 0.01 * RANDOM.random((1, 50, 1))), None, "factor of its"),
    "bias": (lambda: B + 0.1 * RANDOM.standard_normal(64), None, "the same vector"),
    "one token": (lambda: B + (np.arange(50) == 7)[None, :, None], None, "1 of 50 rows hold"),
    "last tokens": (lambda: B + (np.arange(50) >= 40)[None, :, None] * RANDOM.standard_normal(
        B.shape), None, "10 of 50 rows hold 99% of the difference: 40 to 49"),
    "one channel": (lambda: B + (np.arange(64) == 3) * RANDOM.standard_normal((1, 50, 1)), None,
                    "1 of 64 channels hold"),
    "dense": (lambda: B + 0.01 * RANDOM.standard_normal(B.shape), None, ""),
    "equal": (lambda: B.copy(), None, "equal"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_recognised_and_no_other(name: str) -> None:
    make, cause, said = LAWS[name]
    found = look(B, make().astype(np.float32))
    assert found.cause == cause, found.evidence
    assert (said in "; ".join(found.evidence)) and (bool(found.evidence) == bool(said))


TOKENS = np.arange(50)[None, :, None]


@pytest.mark.parametrize(
    ("benchmark", "factors"),
    [
        # one sample's tokens hold the difference, and a factor that is theirs alone
        (B * np.where(TOKENS < 10, 40.0, 1.0), np.where(TOKENS < 10, 0.0589, 0.0126)),
        # one token is another multiple, and hardly seen in the sum
        (B * np.where(TOKENS < 45, 10.0, 1.0), np.where(TOKENS == 47, 1.5, 2.0)),
        # nearly nothing remains of the benchmark, whatever the multiple of what does
        (B, np.where(TOKENS % 2, 0.06, 0.01)),
        # the other sign of a few small ones
        (B * np.where(TOKENS < 45, 10.0, 1.0), np.where(TOKENS < 45, 0.5, -0.5)),
    ],
)
def test_a_factor_of_all_is_one_of_every_token(benchmark: np.ndarray, factors: np.ndarray) -> None:
    found = look(benchmark.astype(np.float32), (benchmark * factors).astype(np.float32))
    assert found.cause is None and "each token is multiplied by a factor" in found.evidence[0]


@pytest.mark.parametrize("factor", [0.01, 0.999, 30.0])
def test_small_tokens_that_noise_hides_keep_no_factor_from_being_one(factor: float) -> None:
    benchmark = B * np.where(TOKENS < 45, 1.0, 1e-2)
    noise = 0.05 * min(abs(factor - 1), factor) * RANDOM.standard_normal(B.shape)
    found = look(benchmark.astype(np.float32), (factor * benchmark + noise).astype(np.float32))
    assert found.cause == "constant_factor", found.evidence
    assert found.left == pytest.approx(float(np.sum(noise**2) / np.sum(
        ((factor - 1) * benchmark + noise) ** 2)), rel=0.1)  # fmt: skip


def test_an_end_that_differs_by_its_last_bits_is_no_cut() -> None:
    flat = np.where(B < -0.5, np.float32(-0.5) * (1 + NOISE), B)
    found = look(flat, np.minimum(np.where(B < -0.5, np.float32(-0.4999999), B), 1.0))
    assert found.cause == "saturation" and "lie beyond 1 and are cut off" in found.law
    both = look(B, np.clip(B, -0.5, 1.0))
    assert "lie beyond -0.5 or 1 and" in both.law


def test_of_what_is_0_on_all_places_no_factor_is_known() -> None:
    assert look(B, 0 * B).cause != "constant_factor"
    assert look(B, 1e-4 * B).cause == "constant_factor"


def test_what_is_not_finite_comes_first() -> None:
    wrong = np.where(np.arange(50)[None, :, None] == 3, np.nan, 1.01 * B).astype(np.float32)
    found = look(B, wrong)
    assert (found.cause, found.rows, found.error) == ("nonfinite", [3], float("inf"))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        look(B, B[:, :3])
