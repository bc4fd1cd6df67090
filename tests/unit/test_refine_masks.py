"""Scores that are hidden otherwise are another mask; what only weighs them is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.traced import Make, first, run, seen, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

LOWEST = torch.finfo(torch.float32).min
PLACES = torch.arange(7)
FAR = PLACES[:, None] - PLACES[None] >= 3


def causal() -> Tensor:
    return torch.full((7, 7), LOWEST).triu(1)


def attention(mask: Callable[[Tensor], Tensor] = lambda m: m) -> Make:
    def mixed(y: Tensor) -> Tensor:
        scores = y @ y.transpose(1, 2) / 5
        return torch.softmax(scores + mask(causal()), -1) @ y

    return mixed


def slopes(mask: Tensor) -> Tensor:
    return mask - 0.3 * (PLACES[:, None] - PLACES[None]).abs()


def one_ahead(mask: Tensor) -> Tensor:
    """k <= q + 1: what is hidden stands one place further on."""
    moved = mask.clone()
    moved[..., 1:] = mask[..., :-1]
    return moved


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "window": (lambda m: m.masked_fill(FAR, LOWEST), "mask"),
    "blocks": (
        lambda m: torch.where(PLACES[:, None] // 4 == PLACES[None] // 4, m, LOWEST), "mask"
    ),
    "prefix": (lambda m: m.masked_fill((PLACES < 4)[None] & (PLACES < 4)[:, None], 0.0), "mask"),
    "two at once": (lambda m: m + torch.full((7, 7), LOWEST).tril(-3), "mask"),
    "one ahead": (one_ahead, "mask"),
    "rolled": (lambda m: m.roll(1, -1), "mask"),
    "upside down": (lambda m: m.flip(0).flip(1), "mask"),
    "another row's": (lambda m: torch.cat([m[1:], m[:1]]), "mask"),
    "no less than a number": (lambda m: m.clamp(min=-8.0), "mask"),
    "the larger of it and a number": (lambda m: torch.maximum(m, torch.tensor(-6.0)), "mask"),
    "scaled to few": (lambda m: m * (5.0 / -LOWEST), "mask"),
    "another number where it hides": (lambda m: torch.where(m < 0, -9.0, m), "mask"),
    "none": (lambda m: m * 0.0, "mask"),
    "slopes": (slopes, "implementation"),
    "cut slopes": (lambda m: slopes(m).clamp(min=LOWEST / 2), "implementation"),
    "softened": (lambda m: m.masked_fill(FAR, -0.5), "implementation"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_other_masks_are_masks_and_what_weighs_scores_is_none(tmp_path: Path, name: str) -> None:
    mask, cause = MASKS[name]
    assert seen(tmp_path, attention(), attention(mask), "attention").cause == cause


@pytest.mark.parametrize(
    "put",
    [
        lambda scores, number: scores.masked_fill(FAR, number),
        lambda scores, number: torch.where(FAR, number, scores),
        lambda scores, number: scores + torch.full((7, 7), number).tril(-3),
    ],
    ids=["masked_fill", "where", "full"],
)
@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [(-math.inf, -8.0, "mask"), (LOWEST, -8.0, "mask"), (0.5, 0.25, "hyperparameter")],
)
def test_a_number_that_hides_no_score_is_another_mask(
    tmp_path: Path, put: Any, right: float, wrong: float, cause: str
) -> None:
    def mixed(number: float) -> Make:
        return lambda y: torch.softmax(put(y @ y.transpose(1, 2) / 5, number), -1) @ y

    for one, other in ((right, wrong), (wrong, right)):
        sides = [run(tmp_path / name / str(one), wrapped(mixed(n)))[0]
                 for name, n in (("b", one), ("t", other))]  # fmt: skip
        assert first(observe(*sides)).cause == cause
