"""A kernel that writes to reserved memory is given nothing by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.refine import unwritten  # noqa: E402
from rlprobe.refine.trace import Argument, Operator, Trace, Value  # noqa: E402
from tests.unit.traced import observed  # noqa: E402

SCALE = {"scale": 2.0}


@torch.library.custom_op("rlprobe_tests::scaled", mutates_args=("out",))
def scaled(x: Tensor, out: Tensor) -> None:
    """A kernel that shows no number of what it computes."""
    out.copy_(x * SCALE["scale"])


def _whole(x: Tensor) -> Tensor:
    return torch.empty(x.shape)


def _viewed(x: Tensor) -> Tensor:
    return torch.empty(x.numel()).view(x.shape)


def _new(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def through(
    reserve: Callable[[Tensor], Tensor], scale: float, *, filled: bool = False, past: float = 0.0
) -> Any:
    """The norm by a kernel that is given reserved memory.

    Args:
        reserve: reserves it.
        scale: of the kernel.
        filled: whether it holds nothing finite, as torch itself fills it where asked to.
        past: what a kernel that no dispatcher sees writes to it first; 0 for none.
    """

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(24))

        def forward(self, x: Tensor) -> Tensor:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(filled)
            out = reserve(x)
            torch.use_deterministic_algorithms(before)
            if past:
                out.numpy().fill(past)
            SCALE["scale"] = scale
            scaled(x.detach(), out)
            return x * self.weight + out

    def change(made: Any) -> None:
        made.layers[1].norm = Norm()

    return change


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [_whole, _viewed, _new])
def test_a_kernel_that_makes_something_else_of_the_same_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve: Callable[[Tensor], Tensor]
) -> None:
    monkeypatch.setattr("tests.unit.traced.model", lambda: built(reserve))
    found = observed(tmp_path, through(reserve, 2.5, filled=True))
    assert found.first is not None
    assert "rlprobe_tests::scaled" in found.first.said
    assert "is given the same on both sides and makes something else" in found.first.said


@pytest.mark.slow
def test_what_lay_in_reserved_memory_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.traced.model", lambda: built(_whole))
    found = observed(tmp_path, through(_whole, 2.0, filled=True))
    assert found.first is None and found.untold == []


@pytest.mark.slow
def test_what_an_unseen_kernel_wrote_there_is_an_input_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.traced.model", lambda: built(_whole))
    found = observed(tmp_path, through(_whole, 2.5, past=3.0))
    assert found.first is None or "is given the same on both sides" not in found.first.said


def built(reserve: Callable[[Tensor], Tensor]) -> nn.Module:
    from tests.unit.capture_helpers import Tiny

    torch.manual_seed(0)
    made = Tiny()
    through(reserve, 2.0)(made)
    return made


def line(n: int, name: str, given: list[Value], made: list[Value]) -> Operator:
    return Operator(n, name, arguments=[Argument("x", tensors=given)], outputs=made)


def test_memory_that_was_written_or_is_read_keeps_its_numbers() -> None:
    reserved, other = Value(0, 0, digest="a"), Value(1, 1, digest="b")
    trace = Trace("module", "m", "cpu", {}, [
        line(0, "aten::empty.memory_format", [], [reserved]),
        line(1, "aten::add_.Tensor", [reserved, other], [reserved]),
        line(2, "aten::empty.memory_format", [], [other]),
        line(3, "lib::kernel", [other], [other]),
        line(4, "lib::kernel", [other], [other]),
    ])  # fmt: skip
    given = [[v.digest for v in op.inputs] for op in unwritten.known(trace).operators]
    assert given == [[], ["a", "b"], [], ["unwritten"], ["b"]]


def test_memory_that_holds_something_else_when_it_is_given_was_written() -> None:
    reserved, later = Value(0, 0, digest="a"), Value(0, 0, digest="b")
    trace = Trace("module", "m", "cpu", {}, [
        line(0, "aten::empty.memory_format", [], [reserved]),
        line(1, "lib::kernel", [later], [later]),
    ])  # fmt: skip
    assert unwritten.known(trace).operators[1].inputs[0].digest == "b"
