"""What is run again of operators that cannot be: collectives, and rows of several lengths."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlprobe.capture.trace.replay import Replay  # noqa: E402


def value(number: int, elements: list[float], **given: Any) -> dict[str, Any]:
    kept = {"value": number, "shape": [len(elements)], "dtype": "torch.float32", "norm": None,
            "digest": str(elements), "elements": elements}  # fmt: skip
    return kept | given


def operator(
    n: int, name: str, given: list[Any], made: list[Any], **scalars: Any
) -> dict[str, Any]:
    """``given`` are the arguments of the schema in order, each a value or a list of them."""
    names = {"c10d::allreduce_": ["tensors"], "aten::stack": ["tensors"]}.get(
        name, ["self", "other"]
    )
    arguments = []
    for argument, one in zip(names, given, strict=False):
        several = isinstance(one, list)
        arguments.append({
            "name": argument, "scalar": None, "tensors": one if several else [one],
            "list": len(one) if several else None,
            "places": list(range(len(one))) if several else None,
        })  # fmt: skip
    arguments += [{"name": k, "scalar": v, "tensors": [], "list": None} for k, v in scalars.items()]
    return {"n": n, "name": name, "site": "a.py:1 f", "direction": "forward",
            "arguments": arguments, "outputs": made}  # fmt: skip


def made(operators: list[dict[str, Any]], result: int, *, wide: bool = False, **kept: Any) -> Any:
    trace = {"operators": operators, "results": [result]}
    return Replay(trace, {k[1:]: v for k, v in kept.items()}, "cpu", wide).run()[0]


def reduced(after: dict[str, Any]) -> list[dict[str, Any]]:
    """Three numbers are doubled, summed over processes in place, and divided by 2."""
    given, sent = value(1, [1.0, 2.0, 3.0]), value(2, [2.0, 4.0, 6.0])
    return [
        operator(1, "aten::add.Tensor", [given, given], [sent]),
        operator(2, "c10d::allreduce_", [[sent]], [value(2, [], digest=None)],
                 process_group="ScriptObject", reduce_op="ScriptObject"),
        operator(3, "aten::div.Tensor", [after, value(4, [2.0, 2.0, 2.0])], [value(3, [])]),
    ]  # fmt: skip


KEPT = {"v1": torch.tensor([1.0, 2.0, 3.0]), "v4": torch.full((3,), 2.0)}


@pytest.mark.parametrize("wide", [False, True])
def test_what_a_collective_left_is_what_the_next_operator_was_given(wide: bool) -> None:
    one = made(reduced(value(2, [2.0, 4.0, 6.0])), 3, wide=wide, **KEPT)
    assert one.tolist() == [1.0, 2.0, 3.0]
    several = made(reduced(value(2, [5.0, 7.0, 9.0])), 3, wide=wide, **KEPT)
    assert several.tolist() == [2.5, 3.5, 4.5]
    assert several.dtype is (torch.float64 if wide else torch.float32)


def test_what_other_processes_sent_is_not_made_up() -> None:
    unknown = value(2, [], shape=[3], digest="another")
    with pytest.raises(RuntimeError, match="what other processes sent is not here"):
        made(reduced(unknown), 3, **KEPT)


def test_rows_of_several_lengths_are_taken_apart_by_their_lengths() -> None:
    rows = value(1, [], shape=[5])
    parts = [value(2, [], shape=[2]), value(3, [], shape=[3])]
    operators = [
        operator(1, "aten::_nested_view_from_jagged", [rows], [rows]),
        operator(2, "aten::unbind.int", [rows], parts, dim=0),
        operator(3, "aten::add.Tensor", [parts[1], parts[1]], [value(4, [])]),
    ]
    assert made(operators, 4, v1=torch.arange(5.0)).tolist() == [4.0, 6.0, 8.0]
    plain = value(1, [], shape=[2, 2])
    taken = [value(2, [], shape=[2]), value(3, [], shape=[2])]
    again = [operator(1, "aten::unbind.int", [plain], taken, dim=0)]
    assert made(again, 3, v1=torch.arange(4.0).reshape(2, 2)).tolist() == [2.0, 3.0]


def test_a_list_that_was_not_recorded_in_full_is_said() -> None:
    stacked = operator(1, "aten::stack", [[value(1, [1.0])] * 3], [value(2, [])], dim=0)
    stacked["arguments"][0]["tensors"].pop()
    with pytest.raises(RuntimeError, match="a list of 3 tensors, and 2 of them were recorded"):
        made([stacked], 2, v1=torch.ones(1))
