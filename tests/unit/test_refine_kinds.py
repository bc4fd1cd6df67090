"""What operators are by the numbers they are given and hand on: sums, repeats, places, choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.refine import experiments, trace  # noqa: E402
from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.capture_helpers import tokens  # noqa: E402
from tests.unit.test_refine_entering import both  # noqa: E402
from tests.unit.traced import first, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[[Tensor], Tensor]


# sums of gradients


def _kept_from_before() -> Callable[[Any], None]:
    """Each gradient is added to what the micro-batch before left."""
    kept: dict[int, Tensor] = {}

    def hook(parameter: Any) -> None:
        before = kept.get(id(parameter))
        kept[id(parameter)] = parameter.grad.clone()
        if before is not None:
            parameter.grad.add_(before)

    return hook


def _added_to_a_total() -> Callable[[Any], None]:
    total: dict[int, Tensor] = {}

    def hook(parameter: Any) -> None:
        total[id(parameter)] = total.get(id(parameter), torch.zeros_like(parameter)).add_(
            parameter.grad
        )
        parameter.grad = total[id(parameter)].clone()

    return hook


def _decayed(parameter: Any) -> None:
    with torch.no_grad():
        parameter.grad.add_(parameter)


def _moved_by_a_number(parameter: Any) -> None:
    parameter.grad.add_(1e-3)


@pytest.mark.parametrize(
    ("hook", "sums"),
    [
        (_kept_from_before(), True),
        (_added_to_a_total(), True),
        (_decayed, False),
        (_moved_by_a_number, False),
    ],
    ids=["the one before", "a total of its own", "a decay", "a number"],
)
def test_gradients_that_are_added_to_gradients_are_accumulated(
    tmp_path: Path, hook: Any, sums: bool
) -> None:
    assert (first(both(tmp_path, hook=hook)).cause == "accumulation") is sums


# casts


def _elsewhere(make: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], dtype: Any) -> Make:
    """Numbers that are computed outside torch, and come back by a cast."""

    def changed(y: Tensor) -> Tensor:
        made = torch.from_numpy(make(y.detach().numpy().astype(np.float64)))
        return made.to(dtype).to(y.dtype)

    return changed


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (_elsewhere(np.tanh, torch.float32), "implementation"),
        (_elsewhere(lambda x: x + 0.01 * x**2, torch.float32), "implementation"),
        (_elsewhere(lambda x: 1.5 * x, torch.bfloat16), "implementation"),
        (lambda y: y.to(torch.bfloat16).to(y.dtype), "rounding_order"),
        (lambda y: y.half().float(), "rounding_order"),
    ],
    ids=["a function", "a curve", "a multiple in bf16", "bf16", "fp16"],
)
def test_a_cast_of_other_numbers_is_no_rounding(tmp_path: Path, make: Make, cause: str) -> None:
    sides = run(tmp_path / "b", wrapped(lambda y: y))[0], run(tmp_path / "t", wrapped(make))[0]
    found = first(observe(sides[0], sides[1], 1e-6, 1e-6))
    assert found.cause == cause
    # the norm itself runs on both sides, and is not said to be the benchmark's alone
    assert "where the benchmark runs" not in found.said
    elsewhere = "it is given numbers that no traced operator made"
    assert (elsewhere in found.said) is (cause == "implementation")


@pytest.mark.parametrize(
    ("scale", "make", "cause"),
    [
        (1e-7, lambda y: y.half().float(), "rounding_order"),  # 0, or a spacing off
        (1e-9, lambda y: y.half().float(), "rounding_order"),  # all of them 0
        (1e-7, lambda y: (100.0 * y).half().float(), "implementation"),
        (1e-7, lambda y: (2.0 * y).to(torch.bfloat16).float(), "implementation"),
    ],
)
def test_small_numbers_lose_more_to_fp16_than_its_round_off(
    tmp_path: Path, scale: float, make: Make, cause: str
) -> None:
    right = run(tmp_path / "b", wrapped(lambda y: y * scale))[0]
    wrong = run(tmp_path / "t", wrapped(lambda y: make(y * scale)))[0]
    assert first(observe(right, wrong, 1e-6, 1e-6)).cause == cause


# heads that are repeated


def _heads(of_query: Callable[[Tensor], Tensor]) -> Make:
    """Four query heads of six numbers; keys and values have two, [3, 7, 24]."""

    def mixed(y: Tensor) -> Tensor:
        rows, length, _ = y.shape
        query = y.view(rows, length, 4, 6).transpose(1, 2)
        key = of_query(y[..., :12].view(rows, length, 2, 6).transpose(1, 2))
        scores = query @ key.transpose(2, 3)
        return (scores.softmax(-1) @ query).transpose(1, 2).reshape(rows, length, 24)

    return mixed


def _expanded(key: Tensor) -> Tensor:
    rows, heads, length, size = key.shape
    return key[:, :, None].expand(rows, heads, 2, length, size).reshape(rows, 4, length, size)


def _of(*heads: int) -> Make:
    return lambda key: key[:, list(heads)]


@pytest.mark.parametrize(
    ("heads", "cause"),
    [
        (_of(0, 0, 0, 1), "layout"),
        (_of(1, 0, 0, 1), "layout"),
        (lambda key: torch.cat([key[:, :1], key[:, 1:], key[:, 1:], key[:, 1:]], 1), "layout"),
        (lambda key: key.index_select(1, torch.tensor([1, 1, 1, 0])), "layout"),
        # a head that nobody reads is left out
        (_of(1, 1, 1, 1), "implementation"),
        (lambda key: 0.5 * _expanded(key), "constant_factor"),
    ],
    ids=["index", "crossed", "cat", "index_select", "one alone", "a factor"],
)
def test_heads_that_read_others_of_the_same_keys_are_a_layout(
    tmp_path: Path, heads: Make, cause: str
) -> None:
    sides = [
        run(tmp_path / name, wrapped(_heads(make)))[0]
        for name, make in (("b", _expanded), ("t", heads))
    ]
    assert first(observe(sides[0], sides[1], 1e-6, 1e-6, forward=True)).cause == cause


# what is given in another's place


OLD = torch.randn(3, 7, generator=torch.Generator().manual_seed(8)) - 4.0


def _ratio(old: Callable[[Tensor, Tensor], Tensor]) -> Make:
    """A loss of the ratio of new and old probabilities; the old ones came in."""

    def loss(logits: Tensor) -> Tensor:
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens()[..., None])[..., 0]
        ratio = torch.exp(chosen - old(OLD, chosen.detach()))
        return -(ratio * OLD.sign()).mean()

    return loss


@pytest.mark.parametrize(
    "old",
    [
        lambda old, new: new,
        lambda old, new: new.view(3, 7),
        lambda old, new: new.clone(),
    ],
    ids=["itself", "a view of itself", "a copy of itself"],
)
def test_what_is_given_in_place_of_what_came_in_is_named(tmp_path: Path, old: Any) -> None:
    sides = [
        run(tmp_path / name, kind="outputs", module=None, loss=_ratio(make))[0]
        for name, make in (("b", lambda old, new: old), ("t", old))
    ]
    found = first(observe(sides[0], sides[1], 1e-6, 1e-6))
    assert found.kind == "wiring" and found.cause == "implementation"
    assert "on the target, and other numbers on the benchmark" in found.said


# numbers that are counted


@pytest.mark.parametrize(
    ("divisor", "cause"),
    [
        (lambda counted: 128, "implementation"),
        (lambda counted: 21.0, "implementation"),
        (lambda counted: counted + 4, "hyperparameter"),
    ],
)
def test_a_number_that_one_side_counts_is_no_setting(
    tmp_path: Path, divisor: Callable[[int], float], cause: str
) -> None:
    def loss(made: Callable[[int], float]) -> Make:
        def of(logits: Tensor) -> Tensor:
            chosen = torch.log_softmax(logits, -1).gather(-1, tokens()[..., None])[..., 0]
            return -chosen.sum() / made(int((tokens() > 3).sum().item()))

        return of

    sides = [
        run(tmp_path / name, kind="outputs", module=None, loss=loss(make))[0]
        for name, make in (("b", lambda counted: counted), ("t", divisor))
    ]
    found = first(observe(sides[0], sides[1]))
    assert found.kind == "scalar" and found.said.startswith("divisor"), found
    if cause == "implementation":
        assert found.cause == cause and "the benchmark's was taken off a tensor" in found.said


# choices


def _choosing(outputs: list[np.ndarray[Any, Any]], decisions: set[int]) -> experiments.Side:
    again = trace.Again(repeats=True, draws=False)
    wide = [np.linspace(1.0, 2.0, 64), np.arange(64.0) % 4]
    formats = frozenset({"torch.float32"})
    return experiments.Side(
        again, list(outputs), list(wide), formats=formats, decisions=frozenset(decisions)
    )


@pytest.mark.parametrize("tipped", [1, 8, 32])
def test_a_choice_that_tips_does_not_say_how_far_off_numbers_are(tipped: int) -> None:
    exact, choice = np.linspace(1.0, 2.0, 64), np.arange(64.0) % 4
    other = choice.copy()
    other[:tipped] += 1
    off = exact * (1 + 2e-3 * (-1.0) ** np.arange(64))
    own = _choosing([exact * (1 + 1e-7), choice], {1})
    rounded = _choosing([off, other], {1})
    target = experiments.Side(
        rounded.again, rounded.outputs, rounded.wide,
        formats=frozenset({"torch.float32", "torch.bfloat16"}), decisions=rounded.decisions,
    )  # fmt: skip
    found = experiments.judge(own, target, 1e-5)
    assert found.cause == "rounding_order" and "bfloat16" in found.statement


# constants that come in


def _with_table(table: Tensor) -> Callable[[Any], None]:
    """A norm that adds the sines of a hundred times a buffer's angles."""

    def change(made: Any) -> None:
        norm = made.layers[1].norm
        norm.register_buffer("table", table.clone())
        right = norm.forward
        norm.forward = lambda x: right(x) + torch.sin(100 * norm.table)

    return change


TABLE = torch.linspace(0.31, 0.97, 24)
SHORT = TABLE.bfloat16().float()
#: Its ends are short numbers, and what is between them is another multiple.
ENDS = torch.cat([SHORT[:1], TABLE[1:-1] * 1.0005, SHORT[-1:]])


@pytest.mark.parametrize(
    ("other", "cause", "said"),
    [
        (SHORT, "rounding_order", "on the target alone, what it holds are bfloat16"),
        (TABLE.half().float(), "rounding_order", "on the target alone, what it holds are float16"),
        (TABLE * 1.001, "unknown", "table, given to"),
        (ENDS, "unknown", "table, given to"),
        (TABLE + 1e-8, None, ""),
    ],
    ids=["bf16", "fp16", "a multiple", "short ends", "a last bit"],
)
def test_a_buffer_that_differs_by_less_than_results_may_is_what_differs(
    tmp_path: Path, other: Tensor, cause: str | None, said: str
) -> None:
    sides = [
        run(tmp_path / name, _with_table(table))[0] for name, table in (("b", TABLE), ("t", other))
    ]
    floor = 3e-3
    found = observe(sides[0], sides[1], 1e-6, floor, forward=True).first
    assert (found and found.cause) == cause, found
    assert found is None or said in found.said


def test_a_buffer_that_the_benchmark_rounds_is_said_to_be_its(tmp_path: Path) -> None:
    sides = [
        run(tmp_path / name, _with_table(table))[0] for name, table in (("b", SHORT), ("t", TABLE))
    ]
    found = first(observe(sides[0], sides[1], 1e-6, 3e-3, forward=True))
    assert found.cause == "rounding_order"
    assert "on the benchmark alone, what it holds are bfloat16 numbers" in found.said
