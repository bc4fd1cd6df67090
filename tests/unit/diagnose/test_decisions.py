"""Is a decision that round-off may tip told from one that is wrong?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.judge import reasons
from rlprobe.judge.roundoff import UNIT
from tests.msprobe.dumps import call, tensor
from tests.unit.diagnose.test_diagnose_dumps import diagnosed, model

NEAR = 1 + 1e-7


def floats(factor: float = 1.0) -> dict[str, Any]:
    return tensor((3.0 * factor, -3.0, 0.25 * factor, 8.0 * factor), (4, 16))


def whole(top: int, dtype: str = "torch.int64") -> dict[str, Any]:
    return tensor((top, 0, None, None), (4,), dtype)


#: Function, and what it makes on either side.
DECISIONS: dict[str, tuple[Any, Any]] = {
    "Torch.argmax": (whole(9), whole(14)),
    "Tensor.__gt__": (whole(True, "torch.bool"), whole(False, "torch.bool")),
    "Torch.topk": (whole(9), whole(14)),
    "Tensor.round_": (tensor((3.0, 0.0, 1.0, 4.0)), tensor((2.0, 0.0, 1.0, 4.0))),
    "Torch.sign": (tensor((1.0, -1.0, 0.5, 4.0)), tensor((1.0, 0.0, 0.5, 4.0))),
}


def found(tmp: Path, name: str, factor: float, made: tuple[Any, Any]) -> Any:
    b, t = (
        model() | {f"{name}.0.forward": call([floats(f)], [m])}
        for f, m in ((1.0, made[0]), (factor, made[1]))
    )
    return diagnosed(tmp, b, t)[1]


@pytest.mark.parametrize("name", DECISIONS)
def test_round_off_may_tip_a_decision(tmp_path: Path, name: str) -> None:
    told = found(tmp_path, name, NEAR, DECISIONS[name])
    assert told["verdict"] == "aligned", told["sentence"]
    assert told["extent"]["actor_update"]["0"]["excused"] == {reasons.DECISION: 1}


@pytest.mark.parametrize("name", DECISIONS)
def test_of_the_same_numbers_a_decision_is_the_same(tmp_path: Path, name: str) -> None:
    told = found(tmp_path, name, 1.0, DECISIONS[name])
    assert told["verdict"] == "diverged" and told["first"]["operator"] == name


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("Torch.add", (whole(9), whole(14))),
        ("Torch.argmax", (floats(), floats(1.5))),
        ("Torch.max", (floats(), floats(1.5))),
    ],
)
def test_what_decides_nothing_is_judged(tmp_path: Path, name: str, made: Any) -> None:
    assert found(tmp_path, name, NEAR, made)["verdict"] == "diverged"


@pytest.mark.parametrize(("off", "verdict"), [(2e-4, "aligned"), (0.1, "diverged")])
def test_signs_of_small_gradients_may_flip_in_adams_update(
    tmp_path: Path, off: float, verdict: str
) -> None:
    """A bias that begins at zero is the sign of its gradient after the first step."""
    moved = 1 + off
    made = floats(), tensor((3.0, -3.0, 0.25, 8.0 * moved), (4, 16))
    b, t = (
        model()
        | {
            "Tensor.addcdiv_.0.forward": {
                "input_args": [floats(), floats(f), floats(f)], "input_kwargs": {}, "output": [m],
            }
        }
        for f, m in ((1.0, made[0]), (NEAR, made[1]))
    )  # fmt: skip
    assert diagnosed(tmp_path, b, t)[1]["verdict"] == verdict


FEW = ("torch.float4_e2m1fn_x2", "torch.float8_e8m0fnu")


def scales(top: float, dtype: str) -> dict[str, Any]:
    return tensor((top, 0.5, 1.0, 4.0), (4,), dtype)


@pytest.mark.parametrize("name", ["Torch.quantize", "Module.q.Quant"])
@pytest.mark.parametrize("dtype", FEW)
def test_rounding_to_a_few_numbers_is_a_decision(tmp_path: Path, dtype: str, name: str) -> None:
    made = (scales(2.0, dtype), scales(4.0, dtype))
    told = found(tmp_path / "apart", name, NEAR, made)
    assert told["verdict"] == "aligned", told["sentence"]
    assert told["extent"]["actor_update"]["0"]["excused"] == {reasons.DECISION: 1}
    told = found(tmp_path / "same", name, 1.0, made)
    assert told["verdict"] == "diverged" and told["first"] is not None


@pytest.mark.parametrize("dtype", FEW)
@pytest.mark.parametrize("factor", [1.0, NEAR])
def test_what_a_call_is_given_in_few_numbers_follows_what_was_before(
    tmp_path: Path, dtype: str, factor: float
) -> None:
    b, t = (
        model()
        | {"Torch.add.0.forward": call([floats()], [floats(f)])}
        | {"Torch.scaled_mm.0.forward": call([scales(top, dtype)], [floats()])}
        for f, top in ((1.0, 2.0), (factor, 4.0))
    )
    told = diagnosed(tmp_path, b, t)[1]
    assert told["verdict"] == ("diverged" if factor == 1.0 else "aligned"), told["sentence"]


@pytest.mark.parametrize("dtype", [*FEW, "torch.float8_e5m2"])
def test_where_one_side_has_a_longer_format_the_shorter_one_bounds(
    tmp_path: Path, dtype: str
) -> None:
    own = {"torch.float4_e2m1fn_x2": 0.25, "torch.float8_e8m0fnu": 0.5, "torch.float8_e5m2": 0.125}
    assert UNIT[dtype] == own[dtype]
    made = (tensor((3.0, 0.5, 1.0, 4.0), (4,), "torch.bfloat16"), scales(4.0, dtype))
    told = found(tmp_path, "Torch.quantize", 1.0, made)
    assert told["verdict"] == "aligned", told["sentence"]
