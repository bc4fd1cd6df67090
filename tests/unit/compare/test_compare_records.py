"""Records that are odd, stand twice or have no counterpart: one is lost, and the reason is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import CASES, case, compared, compared_data


def test_one_odd_file_name_costs_one_record(tmp_path: Path) -> None:
    found = case("save_name_with_slash", tmp_path)
    odd = found.row("actor/loss.0.debug")
    assert odd["status"] == "unreadable" and "actor/loss.0.debug.pt" in odd["reason"]
    assert found.row("ok.0.debug")["identical"]
    assert found.summary["compared"] == 1


T = '{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0}'


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ('{"output": [{"type": "torch.Tensor", "dtype": "x", "shape": [-1]}]}', "shape"),
        ('{"output": [{"type": "torch.Tensor", "dtype": "x", "Max": "big"}]}', "not a number"),
        ('{"output": [{"type": "torch.Tensor", "dtype": "x", "Sketch": "AAAA"}]}', "sketch"),
        ("7", "an object was expected"),
        ('{"output": [9]}', "found 9"),
    ],
)
def test_one_odd_entry_costs_one_record(tmp_path: Path, entry: str, reason: str) -> None:
    for side in "bt":
        (tmp_path / side).mkdir()
        text = '{"data": {"A.a.0.forward": {"output": [%s, %s]}, "B.b.0.forward": %s}}'
        (tmp_path / side / "dump.json").write_text(text % (T, T, entry))
    found = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    assert found.summary["compared"] == 2
    (odd,) = found.records.filter(status="unreadable").iter_rows(named=True)
    assert odd["name"].startswith("B.b.0.forward") and reason in odd["reason"]
    assert found.lack is not None and "B.b.0.forward" in str(found.lack)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ('{"type": "torch.Tensor", "dtype": "x", "shape": [-1]}', "shape"),
        ('{"type": "torch.Tensor", "dtype": "x", "Max": "big"}', "not a number"),
        ('{"type": "torch.Tensor", "dtype": 3}', "dtype is 3"),
        ('{"type": "str", "value": "half \\ud800"}', "surrogates"),
        ('{"type": "torch.Tensor", "dtype": "x", "Max": %s}' % ("9" * 5000), "not a number"),
    ],
)  # fmt: skip
def test_one_odd_argument_costs_itself_alone(tmp_path: Path, odd: str, reason: str) -> None:
    text = '{"data": {"A.a.0.forward": {"input_args": [%s, %s, %s], "output": [%s]}}}'
    for side in "bt":
        (tmp_path / side).mkdir()
        (tmp_path / side / "dump.json").write_text(text % (T, odd, T, T))
    found = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    assert found.summary["compared"] == 3
    row = found.row("A.a.0.forward.input.1")
    assert row["status"] == "unreadable" and reason in row["reason"]


@pytest.mark.parametrize(
    ("one", "other", "status"),
    [
        ("9" * 5000, "9" * 4999 + "8", "matched"),
        ("9" * 30, "9" * 29 + "8", "matched"),
        ("1e999", "1e998", "nonfinite"),
    ],
)
def test_numbers_that_no_type_holds_are_numbers(
    tmp_path: Path, one: str, other: str, status: str
) -> None:
    """msprobe writes whatever an argument is."""
    text = (
        '{"data": {"A.a.0.forward": {"input_args": [{"type": "%s", "value": %s}], "output": [%s]}}}'
    )
    kind = "float" if "e" in one else "int"
    for side, value in (("b", one), ("t", other)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "dump.json").write_text(text % (kind, value, T))
    found = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    row = found.row("A.a.0.forward.input.0")
    assert row["status"] == status
    assert row["identical"] is (status == "nonfinite")
    assert found.row("A.a.0.forward.output.0")["status"] == "matched"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"data": {"A.a.0.forward": {"output": [%s]}, "A.a.0.forward": {"output": [%s]}}}', "A.a"),
        ('{"data": {"A.a.0.forward": {"output": [%s], "output": [%s]}}}', "A.a"),
        ('{"task": 1, "task": 2, "data": {"A.a.0.forward": {"output": [%s, %s]}}}', "file"),
        ('{"data": {"A.a.0.forward": {"output": [%s, {"type": "int", "value": 1, "value": 2}]}}}',
         "A.a"),
    ],
)  # fmt: skip
def test_a_key_that_stands_twice_is_said(tmp_path: Path, text: str, name: str) -> None:
    for side in "bt":
        (tmp_path / side).mkdir()
        (tmp_path / side / "dump.json").write_text(text.replace("%s", T))
    found = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    (odd,) = found.records.filter(status="unreadable").iter_rows(named=True)
    assert odd["name"].startswith(name) and "twice" in odd["reason"]


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_entries_that_stand_twice_are_said_of_large_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    from rlprobe.dumps import dumpjson, repeated

    monkeypatch.setattr(repeated, "THOROUGH", 0)
    data = {f"Torch.f.{n}.forward": call([], [tensor()]) for n in range(9)}
    text = json.dumps({"task": "statistics", "data": data}, indent=indent)
    path = tmp_path / "dump.json"
    path.write_text(text)
    assert "unreadable" not in set(dumpjson.read(path)["dtype"])
    again = text.replace("Torch.f.7.forward", "Torch.f.3.forward")
    path.write_text(again)
    odd = dumpjson.read(path).filter(dtype="unreadable")
    assert odd["name"].to_list() == ["Torch.f.3.forward"]


def test_a_slot_nobody_knows_is_compared_and_said(tmp_path: Path) -> None:
    data: list[dict[str, Any]] = [
        {"Torch.f.0.forward": call([], [tensor()], router=[tensor((top, 0.0, 0.5, 1.0)), 3])}
        for top in (1.0, 2.0)
    ]
    found = compared_data(tmp_path, *data)
    assert found.row("Torch.f.0.forward.router.0")["error"] > 0
    assert found.row("Torch.f.0.forward.router.1")["identical"]
    assert any("slots that" in n and "router (2)" in n for n in found.summary["notes"])


def test_nothing_is_compared_where_every_shape_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [str(CASES / "every_shape_differs" / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "10 records: shapes differ" in said and "[4, 8] against [6, 8]" in said
    summary = json.loads((tmp_path / "out/unnamed/summary.json").read_text())
    assert summary["compared"] == 0 and set(summary["coverage"].values()) == {0}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ((1, 8), (8,), "the number of elements does not"),
        ((4, 8), (8, 4), "the number of elements does not"),
        ((2, 3, 8), (6, 8), "the number of elements does not"),
        ((4, 8), (6, 8), "other batches, lengths or shards"),
        ((4, 8), (32, 8), "other batches, lengths or shards"),
    ],
)
def test_another_layout_is_told_from_another_size(
    tmp_path: Path, one: tuple[int, ...], other: tuple[int, ...], said: str
) -> None:
    data = [{"Torch.f.0.forward": call([], [tensor(shape=shape)])} for shape in (one, other)]
    lack = str(compared_data(tmp_path, data[0], data[1]).lack)
    assert "1 record: shapes differ" in lack and said in lack
    assert ("lay the same number of elements out otherwise" in lack) is ("elements" in said)


def test_records_of_other_types_are_not_compared_unless_meant(tmp_path: Path) -> None:
    data: list[dict[str, Any]] = [
        {"Torch.f.0.forward": call([], [tensor(dtype=f"torch.{dtype}")])}
        for dtype in ("float32", "bfloat16")
    ]
    found = compared_data(tmp_path / "plain", *data)
    assert found.summary["compared"] == 0
    assert found.lack is not None and "torch.float32 against torch.bfloat16" in str(found.lack)
    meant = compared_data(tmp_path / "meant", *data, pair="high_precision")
    assert meant.summary["compared"] == 1 and meant.lack is None


@pytest.mark.parametrize("place", ["benchmark", "target", "out"])
def test_an_empty_path_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    paths = {"benchmark": str(tmp_path), "target": str(tmp_path), "out": str(tmp_path / "out")}
    paths[place] = ""
    command = ["compare", paths["benchmark"], paths["target"], "-o", paths["out"]]
    assert main(command) == 2
    assert "is an empty path" in capsys.readouterr().err


def test_long_names_are_shortened(tmp_path: Path) -> None:
    name = "Torch." + "x" * 3000 + ".0.forward"
    data: list[dict[str, Any]] = [
        {name: call([], [tensor(shape=shape)])} for shape in ((2, 8), (4, 8))
    ]
    found = compared_data(tmp_path, *data)
    said = str(found.lack)
    assert "…" in said and max(map(len, said.splitlines())) < 300
    assert found.records["name"][0] == f"{name}.output.0"


def test_a_step_or_rank_without_counterpart_is_the_reason(tmp_path: Path) -> None:
    data = {"Torch.f.0.forward": call([], [tensor()])}
    for side, steps in (("b", (0, 1, 2)), ("t", (0,))):
        for step in steps:
            dumps.write(tmp_path / side / f"step{step}/rank0", data)
    found = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    reasons = {one["reason"] for one in found.summary["not_compared"]}
    assert reasons == {"the target has no step 1", "the target has no step 2"}
    said = str(found.lack)
    assert "the target has no steps 1 and 2" in said
    assert "compare steps that both sides have" in said and "--map-step" in said


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ((0, 1, 2, 3), "ranks 1 to 3 of step 0"),
        ((0, 5), "rank 5 of step 0"),
        ((0, 1, 4), "ranks 1 and 4 of step 0"),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_ranks_without_counterpart_are_one_reason(
    tmp_path: Path, ranks: tuple[int, ...], named: str, steps: int
) -> None:
    data = {"Torch.f.0.forward": call([], [tensor()])}
    for side, own in (("b", ranks), ("t", (0,))):
        for step in range(steps):
            for rank in own:
                dumps.write(tmp_path / side / f"step{step}/rank{rank}", data)
    said = str(compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").lack)
    named = named if steps == 1 else named.replace("step 0", "steps 0 and 1")
    assert f"{steps * (len(ranks) - 1)} record" in said and f"the target has no {named};" in said
    assert "STAGE/stepN/rankR" in said


def test_two_ranks_of_any_number_are_compared_when_both_are_given(tmp_path: Path) -> None:
    data = {"Torch.f.0.forward": call([], [tensor()])}
    pair = [tmp_path / "b/step0/rank0", tmp_path / "t/step3/rank4"]
    for place in pair:
        dumps.write(place, data)
    assert compared(pair[0], pair[1], tmp_path / "out").lack is None


def test_other_levels_are_the_reason(tmp_path: Path) -> None:
    modules = {"Module.a.Linear.forward.0": call([], [tensor()])}
    functions = {"Functional.linear.0.forward": call([], [tensor()])}
    found = compared_data(tmp_path, modules, functions)
    assert "at the same level" in str(found.lack) and "Functional" in str(found.lack)
