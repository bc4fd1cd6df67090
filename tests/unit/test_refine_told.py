"""A suspect is told what the benchmark's was told: is it that number, and is all put back?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from rlprobe.capture.trace import exchange as capture  # noqa: E402
from rlprobe.capture.trace import told  # noqa: E402
from rlprobe.diagnose.diagnosis import CONSISTENT, OBSERVED, REPRODUCED, UNKNOWN, Cause, Known  # noqa: E402
from rlprobe.refine import decide, exchange  # noqa: E402
from rlprobe.refine.substitution import Substituted  # noqa: E402
from tests.unit.capture_helpers import rank_dir  # noqa: E402
from tests.unit.traced import NORM, run  # noqa: E402

FLOOR = 1e-5
Change = Callable[[Any], None]


class Held(nn.Module):
    """Scales, caps and guards by numbers that it, a part of it and an object that it holds have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.eps, self.calls, self.spare, self.cap = 1e-6, 0, 0.5, None
        self.impl = SimpleNamespace(scale=0.25, heads=4, _own=1.0)
        self.part = nn.Dropout(0.0)
        self.part.power = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        made = made * self.impl.scale * self.impl.heads**self.part.power
        return made if self.cap is None else self.cap * torch.tanh(made / self.cap)


def entry(tmp_path: Path, change: Change) -> exchange.Entry:
    """What the target reports that was built as the benchmark but for a change."""
    changed: list[Any] = []

    def held(made: Any) -> None:
        made.layers[1].norm = Held()

    def other(made: Any) -> None:
        held(made)
        change(made.layers[1].norm)
        changed.append(made.layers[1].norm)

    run(tmp_path / "b", held, keep_outputs=True)
    there = rank_dir(tmp_path / "b") / "outputs"
    run(tmp_path / "t", other, kind=None, substitute=str(there))
    fresh = Held()
    change(fresh)
    own, before = ({n: one.value for n, one in told.told(each).items()}
                   for each in (changed[0], fresh))  # fmt: skip
    assert {**own, "calls": 0} == before, "its numbers are its own again"
    path = rank_dir(tmp_path / "t") / capture.DIRECTORY / capture.REPORT
    return msgspec.json.decode(path.read_bytes(), type=exchange.Entry)


def set_(where: Callable[[Any], Any], name: str, value: Any) -> Change:
    return lambda norm: setattr(where(norm), name, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_(lambda n: n, "eps", 1e-2), "eps 0.01 on the target instead of 1e-06"),
        (set_(lambda n: n.impl, "scale", 0.3), "impl.scale 0.3 on the target instead of 0.25"),
        (set_(lambda n: n.part, "power", 2.0), "part.power 2 on the target instead of 1"),
        (set_(lambda n: n, "cap", 0.5), "cap 0.5 on the target instead of None"),
    ],
)
def test_a_number_that_makes_the_difference_is_named(
    tmp_path: Path, change: Change, said: str
) -> None:
    found = exchange.setting(entry(tmp_path, change), NORM, FLOOR)
    assert found is not None and found.startswith(f"{said} in {NORM}: told the benchmark's")


def test_of_two_that_differ_the_one_that_matters_is_named(tmp_path: Path) -> None:
    def change(norm: Any) -> None:
        norm.spare, norm.impl.scale = 0.7, 0.3

    found = exchange.setting(entry(tmp_path, change), NORM, FLOOR)
    assert found is not None and "impl.scale" in found and "spare" not in found


def test_two_that_make_it_together_are_both_named(tmp_path: Path) -> None:
    def change(norm: Any) -> None:
        norm.eps, norm.impl.scale = 1e-2, 0.3

    found = exchange.setting(entry(tmp_path, change), NORM, FLOOR)
    assert found is not None and "eps 0.01" in found and "impl.scale 0.3" in found


def test_a_number_that_nothing_uses_is_no_cause(tmp_path: Path) -> None:
    def change(norm: Any) -> None:
        norm.spare = 0.7
        right = norm.forward
        norm.forward = lambda x: 1.5 * right(x)

    found = entry(tmp_path, change)
    assert [one.names for one in found.told] == [["spare"]]
    assert exchange.setting(found, NORM, FLOOR) is None


def test_whole_numbers_are_said_and_not_tried(tmp_path: Path) -> None:
    found = entry(tmp_path, set_(lambda n: n.impl, "heads", 5))
    assert [one for one in found.told if one.tried] == []
    assert exchange.setting(found, NORM, FLOOR) is None
    said = exchange.said(found, NORM, FLOOR)
    assert said is not None
    assert "impl.heads 5 on the target instead of 4, which was not tried" in said


def test_what_calls_change_themselves_was_told_by_nobody(tmp_path: Path) -> None:
    found = entry(tmp_path, set_(lambda n: n, "eps", 1e-2))
    assert [one.names for one in found.told] == [["eps"]], "calls are counted on both sides"


def test_alike_nothing_is_tried(tmp_path: Path) -> None:
    assert entry(tmp_path, lambda _: None).told == []


def test_a_number_that_cannot_be_set_leaves_all_as_it_was(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Fixed:
        scale: float

    module: Any = Held()
    module.impl = Fixed(0.3)
    theirs = {**{n: one.value for n, one in told.told(module).items()}, "impl.scale": 0.25,
              "eps": 1.0}  # fmt: skip
    apart = told.others(told.told(module), theirs)
    assert set(apart) == {"impl.scale", "eps"}
    with pytest.raises(dataclasses.FrozenInstanceError), told.instead(apart):
        pass
    assert module.eps == 1e-6 and module.impl.scale == 0.3


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [(0, 0.0, False), (True, 1, False), (float("nan"), float("nan"), False), (None, 0.0, True)],
)
def test_numbers_are_apart_where_they_are_others(one: object, other: object, apart: bool) -> None:
    module = nn.Identity()
    module.scale = one  # type: ignore[assignment]
    theirs = json.loads(json.dumps({"scale": other}))
    assert bool(told.others(told.told(module), theirs)) is apart


SAID = "impl.scale 0.3 on the target instead of 0.25 in norm: told the benchmark's"


@pytest.mark.parametrize(
    ("class_", "known", "taken"),
    [
        ("unknown", UNKNOWN, True),
        ("implementation", OBSERVED, True),
        ("constant_factor", CONSISTENT, True),
        ("rounding_order", OBSERVED, False),
        ("nondeterministic", REPRODUCED, False),
    ],
)
def test_it_takes_the_place_of_what_says_less(class_: str, known: Known, taken: bool) -> None:
    before = Cause(class_, known, "", [])
    after = Substituted("norm", "actor_update", 1, [], True, "", setting=SAID)
    found = decide._told(before, after)
    expected = ("hyperparameter", REPRODUCED) if taken else (class_, known)
    assert (found.class_, found.known) == expected
    assert decide._told(before, msgspec.structs.replace(after, setting="")) is before
