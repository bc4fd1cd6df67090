"""Arguments that are no tensors and no plain values of Python, as msprobe 26.2 writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor
from tests.unit.compare_helpers import Result, compared_data

NAME = "Distributed.isend.0.forward"
ARGUMENT = f"{NAME}.input.0"


def pair(tmp_path: Path, benchmark: Any, target: Any) -> Result:
    """One call that is given the argument."""
    sides = ({NAME: call([given], [tensor()])} for given in (benchmark, target))
    return compared_data(tmp_path, *sides)


def group(*ranks: int, kind: str = "torch.ProcessGroup") -> dict[str, Any]:
    return {"type": kind, "group_ranks": list(ranks), "group_id": "1"}


def memory(name: str) -> dict[str, Any]:
    return {"type": "torch.memory_format", "format": name}


@pytest.mark.parametrize(
    ("benchmark", "target"),
    [
        (memory("contiguous_format"), memory("channels_last")),
        (group(0, 1), group(0, 2)),
        (group(0, 1), {"type": "torch.ProcessGroup"}),
        (group(0, 1, kind="mindspore.ProcessGroup"), group(0, 2, kind="mindspore.ProcessGroup")),
        # a key that is another type's
        (group(0, 1, kind="other.ProcessGroup"), group(0, 2, kind="other.ProcessGroup")),
        (
            {"type": "mindspore.format", "format": "NCHW"},
            {"type": "mindspore.format", "format": "NHWC"},
        ),
        (
            {"type": "mindspore.dtype", "value": "Float32"},
            {"type": "mindspore.dtype", "value": "Float16"},
        ),
        # of a type that msprobe may know one day
        ({"type": "torch.layout", "name": "strided"}, {"type": "torch.layout", "name": "sparse"}),
        (scalar([0, None, None], "slice"), scalar([0, 4, None], "slice")),
    ],
)
def test_values_that_stand_under_other_keys_are_compared(
    tmp_path: Path, benchmark: Any, target: Any
) -> None:
    row = pair(tmp_path / "unlike", benchmark, target).row(ARGUMENT)
    assert (row["error"], row["identical"]) == (1.0, False)
    row = pair(tmp_path / "like", benchmark, benchmark).row(ARGUMENT)
    assert (row["error"], row["identical"]) == (0.0, True)


@pytest.mark.parametrize(
    ("key", "other", "error"),
    [("op", "irecv", 1.0), ("peer", 3, 2.0), ("tag", 7, 1.0), ("group_id", "ff", 1.0)],
)
@pytest.mark.parametrize("kind", ["torch.distributed.P2POp", "mindspore.mint.distributed.P2POp"])
def test_whom_a_tensor_is_sent_to_is_compared(
    tmp_path: Path, kind: str, key: str, other: Any, error: float
) -> None:
    one = {
        "class_type": kind, "tensor": tensor(), "op": "isend", "peer": 1,
        "tag": 0, "group_id": "00",
    }  # fmt: skip
    found = pair(tmp_path, one, one | {key: other})
    differing = found.records.filter(found.records["error"] != 0).get_column("name").to_list()
    assert differing == [f"{ARGUMENT}.{key}"]
    assert found.row(f"{ARGUMENT}.{key}")["error"] == error
    assert found.row(ARGUMENT)["status"] == "matched"


@pytest.mark.parametrize(
    ("kind", "part", "other"),
    [
        ("some.Collective", "root", 3),
        ("mindspore.hccl.Handle", "name", "reduce"),
        (["no", "name"], "root", 3),
    ],
)
def test_parts_of_an_object_that_nobody_knows_are_compared(
    tmp_path: Path, kind: Any, part: str, other: Any
) -> None:
    """Plain values in it are parts of it; without the name of a class they are no arguments."""
    one = {"class_type": kind, "tensor": tensor(), "root": 2, "name": "gather"}
    found = pair(tmp_path, one, one | {part: other})
    statuses = {row["name"]: row["status"] for row in found.records.iter_rows(named=True)}
    assert statuses[f"{ARGUMENT}.tensor"] == "matched"
    if isinstance(kind, str):
        assert set(statuses.values()) == {"matched"}
        assert found.row(f"{ARGUMENT}.{part}")["error"] > 0
    else:
        assert statuses[f"{ARGUMENT}.{part}"] == "unreadable"


@pytest.mark.parametrize(
    ("kind", "benchmark", "target", "error"),
    [
        ("float64", 0.5, 0.5 + 2.0**-30, 2.0**-29),
        ("float32", 0.5, 0.75, 0.5),
        ("int64", 2**53, 2**53 + 1, 2.0**-53),
        ("uint8", 200, 201, 1 / 200),
        ("bool_", True, False, 1.0),
        ("float64", -0.0, 0.0, 0.0),
    ],
)
def test_numpys_scalars_are_numbers(
    tmp_path: Path, kind: str, benchmark: Any, target: Any, error: float
) -> None:
    row = pair(tmp_path, scalar(benchmark, kind), scalar(target, kind)).row(ARGUMENT)
    assert (row["status"], row["identical"]) == ("matched", False)
    assert row["error"] == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("kind", ["float", "float64", "float32", "float16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_scalar_that_is_not_finite_is_told_by_its_value(
    tmp_path: Path, kind: str, value: float
) -> None:
    row = pair(tmp_path, scalar(value, kind), scalar(value, kind)).row(ARGUMENT)
    assert (row["status"], row["reason"]) == ("nonfinite", "both")
    assert row["identical"] is (value == math.inf)
    assert row["value_benchmark"] == repr(value)


@pytest.mark.parametrize("where", ["tensor", "scalar", "in a list"])
def test_a_key_that_nobody_knows_is_said_and_costs_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    odd: Any = scalar(3) if where == "scalar" else tensor()
    odd = odd | {"Median": 0.125}
    for side in "bt":
        given = [[odd]] if where == "in a list" else odd
        dumps.write(tmp_path / side, {NAME: call([given], [tensor()])})
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(command) == 0
    assert "no key 'Median' of a tensor or scalar (of 1); it is not compared" in (
        capfd.readouterr().err
    )


def test_how_a_tensor_is_laid_over_devices_is_no_unknown_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its statistics are those of the local part, and are compared."""
    laid = tensor(device_mesh=[0, 1], placements=[{"Shard": {"dim": 0}}])
    row = pair(tmp_path, laid | {"type": "torch.distributed.tensor.DTensor"}, tensor()).row(
        ARGUMENT
    )
    assert (row["status"], row["error"], row["identical"]) == ("matched", 0.0, False)
    assert "no key" not in capfd.readouterr().err


@pytest.mark.parametrize("sides", ["b", "bt"])
def test_what_capture_says_besides_is_known(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of rlprobe.capture.light.statistics and rlprobe.capture.updates: read the quick way."""
    more = {
        "Sketch": None,
        "Digest": None,
        "NonFinite": "overflow",
        "GlobalShape": [8, 8],
        "Offset": [4, 0],
    }
    pairs = [tensor() | more if side in sides else tensor() for side in "bt"]
    monkeypatch.setattr("rlprobe.dumps.anyentry.nodes", None)  # the slow way is not gone
    row = pair(tmp_path, *pairs).row(ARGUMENT)
    assert (row["status"], row["error"]) == ("matched", 0.0)
    assert "no key" not in capfd.readouterr().err


def test_whether_an_output_is_nan_is_a_record_of_its_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """msprobe's task nan_check says it of every call."""
    sides = ({NAME: call([], [tensor()], is_nan=said)} for said in (False, True))
    found = compared_data(tmp_path, *sides)
    row = found.row(f"{NAME}.is_nan")
    assert (row["value_benchmark"], row["value_target"], row["error"]) == ("False", "True", 1.0)
    assert "no slot" not in capfd.readouterr().err
    assert not any("knows nothing of" in note for note in found.summary["notes"])


def test_one_leaf_in_place_of_a_list_has_msprobes_name(tmp_path: Path) -> None:
    """``op_item_parse`` of msprobe adds no number to it, and no dot."""
    sides = ({NAME: {"input": tensor((x, -x, 0.0, 2 * x)), "output": [None]}} for x in (1.0, 2.0))
    assert compared_data(tmp_path, *sides).row(f"{NAME}.input")["error"] > 0


@pytest.mark.parametrize("name", ["dump.json", "debug.json"])
@pytest.mark.parametrize("at", ["step0/rank0", "step0/rank1", "step0/proc7", ""])
def test_a_directory_in_a_dumps_place_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, at: str
) -> None:
    for side in "bt":
        dumps.write(tmp_path / side / "step0/rank0" if at else tmp_path / side, {})
    odd = tmp_path / "t" / at / name
    if at.endswith("proc7"):
        (tmp_path / "t/step0/rank0").rename(odd.parent)
    odd.unlink(missing_ok=True)
    odd.mkdir(parents=True)
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(command) == 1
    assert f"{odd} is a directory: a dump is a file of that name" in capsys.readouterr().err


def test_a_link_to_nowhere_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in "bt":
        dumps.write(tmp_path / side / "step0/rank0", {})
    odd = tmp_path / "t/step0/rank0/dump.json"
    odd.unlink()
    odd.symlink_to(tmp_path / "elsewhere.json")
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert f"{odd} (a link to {tmp_path / 'elsewhere.json'}) cannot be read" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: b"", "is empty"),
        (lambda text: b" \n", "is empty"),
        (lambda text: text.decode().encode("utf-16"), "is UTF-16"),
        (lambda text: b"\x1f\x8b" + text, "is compressed"),
        (lambda text: text[:-30], "is not a complete dump file"),
    ],
)
def test_what_a_file_is_that_holds_no_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    for side in "bt":
        path = dumps.write(tmp_path / side, {NAME: call([tensor()], [tensor()])})
    path.write_bytes(change(path.read_bytes()))
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(command) == 1
    assert f"{path} {said}" in capsys.readouterr().err


def test_a_byte_order_mark_costs_nothing(tmp_path: Path) -> None:
    for side in "bt":
        path = dumps.write(tmp_path / side, {NAME: call([tensor()], [tensor()])})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    result = tmp_path / "r.json"
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main([*command, "--json", str(result)]) == 0
    assert json.loads(result.read_text())["stages"][0]["compared"] == 2


#: Statistics of an argument, nearly the same on another device, and others.
MASK, NEAR, OTHER = ((top, -1.0, 0.1, 3.0) for top in (0.5, 0.5001, 0.7))


def by_name(
    tmp_path: Path,
    position: Any,
    keyword: Any,
    name: str = "Module.l.Attn.forward.0",
    there: str | None = None,
    **more: Any,
) -> Result:
    """A call whose second argument one side gives by position, the other as ``mask``."""
    x, y = tensor(), tensor((2.0, -2.0, 0.5, 4.0))
    entry = {**call([x], [y]), "input_kwargs": {"mask": keyword, **more}}
    return compared_data(tmp_path, {name: call([x, position], [y])}, {there or name: entry})


@pytest.mark.parametrize(
    ("position", "keyword"),
    [
        (tensor(MASK), tensor(MASK)),
        (tensor(MASK), tensor(NEAR)),
        (scalar(0.125), scalar(0.125)),
        (scalar(True), scalar(True)),
        (tensor((math.inf, -math.inf, None, None)), tensor((math.inf, -math.inf, None, None))),
    ],
)
@pytest.mark.parametrize(
    "there", [None, "Module.model.l.Attn.forward.0", "Module.l.NPUAttn.forward.0"]
)
def test_an_argument_is_given_by_position_or_by_name(
    tmp_path: Path, position: Any, keyword: Any, there: str | None
) -> None:
    found = by_name(tmp_path, position, keyword, there=there)
    counts = found.summary["counts"]
    # an infinite mask is matched as well
    assert counts["matched"] + counts["nonfinite"] == found.records.height == 3
    assert found.summary["rules"]["keyword"] == 1
    row = found.records.filter(pl.col("rule") == "keyword").row(0, named=True)
    assert row["name_benchmark"].endswith(".input.1") and row["name_target"].endswith(".input.mask")


def test_an_argument_of_a_function_and_by_name_on_the_benchmark(tmp_path: Path) -> None:
    x, mask = tensor(), tensor(MASK)
    named = {**call([x], [x]), "input_kwargs": {"mask": mask}}
    name = "Functional.scaled_dot_product_attention.0.forward"
    found = compared_data(tmp_path, {name: named}, {name: call([x, mask], [x])})
    assert found.summary["counts"]["matched"] == 3
    assert found.summary["rules"] == {"keyword": 1}


@pytest.mark.parametrize(
    ("position", "keyword", "more"),
    [
        (tensor(MASK), tensor(OTHER), {}),
        (tensor(MASK), tensor(MASK, (16,)), {}),
        (tensor(MASK), tensor(MASK, dtype="torch.float16"), {}),
        (tensor((None,) * 4), tensor((None,) * 4), {}),
        (scalar(0.125), scalar(0.25), {}),
        (scalar("a"), scalar("b"), {}),
        (scalar(1), scalar(True), {}),
        # one of two that are as much like it
        (tensor(MASK), tensor(MASK), {"bias": tensor(MASK)}),
        (tensor(MASK), tensor(MASK), {"scale": scalar(1.0)}),
    ],
)
def test_what_may_be_another_argument_stays_alone(
    tmp_path: Path, position: Any, keyword: Any, more: dict[str, Any]
) -> None:
    found = by_name(tmp_path, position, keyword, **more)
    counts = found.summary["counts"]
    assert (counts["matched"], counts["benchmark_only"]) == (2, 1)
    assert counts["target_only"] == 1 + len(more)
    assert "keyword" not in found.summary["rules"]


def test_arguments_of_other_positions_or_calls_stay_alone(tmp_path: Path) -> None:
    x, mask = tensor(), tensor(MASK)
    # both by name, and not by the same
    names = [{**call([x], [x]), "input_kwargs": {key: mask}} for key in ("mask", "bias")]
    name = "Module.l.Attn.forward.0"
    found = compared_data(tmp_path / "names", {name: names[0]}, {name: names[1]})
    assert found.summary["counts"]["benchmark_only"] == 1
    # of two calls of which nothing else is matched
    other = "Module.q.Other.forward.0"
    calls = {name: call([mask], [])}, {other: {**call([], []), "input_kwargs": {"mask": mask}}}
    found = compared_data(tmp_path / "calls", *calls)
    assert found.summary["counts"]["benchmark_only"] == 1
