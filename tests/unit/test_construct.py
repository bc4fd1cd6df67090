"""construct.json: which module's call a function ran in, read, used, and never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import rlprobe
from rlprobe.cli import main
from rlprobe.dumps import construct
from rlprobe.errors import DumpError
from rlprobe.judge import execution
from rlprobe.judge.nesting import Told
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import list_files

LINEAR = "Functional.linear.{}.forward"
Q, K, ATTENTION = (
    "Module.model.q.Linear.forward.0",
    "Module.model.k.Linear.forward.0",
    "Module.model.Attention.forward.0",
)
SOFTMAX = "Torch.softmax.0.forward"
#: What msprobe writes of an attention with two projections.
TOLD: dict[str, Any] = {
    LINEAR.format(0): Q, Q: ATTENTION, LINEAR.format(1): K, K: ATTENTION, SOFTMAX: ATTENTION,
    ATTENTION: None,
}  # fmt: skip


def leaf(top: float) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), (4, 8))


def attention(wrong: str | None = None) -> dict[str, Any]:
    """The calls in the order in which they complete; from ``wrong`` on, outputs are 1 % larger."""
    data: dict[str, Any] = {}
    factor, given = 1.0, 1.0
    inside = {Q: LINEAR.format(0), K: LINEAR.format(1)}
    for number, name in enumerate((Q, K, SOFTMAX)):
        function = inside.get(name, name)
        before = given * factor if number > 1 else given
        factor = 1.01 if function == wrong else factor
        after = (2.0 + number) * factor
        data[function] = call([leaf(before)], [leaf(after)])
        if name in inside:
            data[name] = call([leaf(before)], [leaf(after)])
        given = 2.0 + number
    data[ATTENTION] = call([leaf(1.0)], [leaf(4.0 * factor)])
    return data


def pair(root: Path, wrong: str, told: Any, sides: str = "bt") -> list[str]:
    for side, data in (("b", attention()), ("t", attention(wrong))):
        directory = root / side / "actor_update/step0/rank0"
        dumps.write(directory, data)
        if side in sides and told is not None:
            text = told if isinstance(told, str) else json.dumps(told)
            (directory / "construct.json").write_text(text)
    return ["compare", str(root / "b"), str(root / "t"), "-o", str(root / "out")]


def printed(capsys: pytest.CaptureFixture[str], command: list[str]) -> list[str]:
    assert main(command) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("sides", ["bt", "b", "t"])
@pytest.mark.parametrize(
    ("wrong", "module"),
    [(LINEAR.format(0), "model.q (Functional.linear)"),
     (LINEAR.format(1), "model.k (Functional.linear)"),
     (SOFTMAX, "model (Torch.softmax)")],
)  # fmt: skip
def test_the_module_of_the_function_that_parts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, module: str, sides: str
) -> None:
    """One side's file is enough; the names are the benchmark's where it has one."""
    lines = printed(capsys, pair(tmp_path, wrong, TOLD, sides))
    assert lines[0] == f"First to part: {module}, in actor_update, step 0, rank 0"
    path = module.partition(" ")[0]
    assert lines[1].strip() == f"{wrong}.output.0, in {path}"
    listed = [line for line in lines if line.endswith(f"{wrong}.output.0, in {path}")]
    assert len(listed) == 2  # as the first, and among the worst
    # a module's own record says itself where it is
    assert not any("Module." in line and ", in " in line for line in lines[1:])


def test_where_no_stack_was_recorded_the_calls_around_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*pair(tmp_path, SECOND, TOLD, "t"), "--stacks"]
    lines = [line.strip() for line in printed(capsys, command)]
    at = lines.index("benchmark: no stack was recorded")
    assert lines[at + 1 : at + 4] == ["target: no stack was recorded; it ran in", K, ATTENTION]


def test_without_the_file_no_module_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, pair(tmp_path, LINEAR.format(0), None))
    assert lines[0] == "First to part: Functional.linear, in actor_update, step 0, rank 0"
    assert ", in model" not in "\n".join(lines)


def test_a_module_that_was_not_dumped_is_named_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a ``list`` msprobe dumps some calls, and tells of all."""
    command = pair(tmp_path, LINEAR.format(1), TOLD)
    for side in "bt":
        file = tmp_path / side / "actor_update/step0/rank0/dump.json"
        whole = json.loads(file.read_text())
        for name in (Q, K, ATTENTION):
            del whole["data"][name]
        file.write_text(json.dumps(whole))
    assert printed(capsys, command)[0].startswith("First to part: model.k (Functional.linear),")


def test_megatron_and_what_is_no_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: dict[str, Any] = {name: [around, 0] for name, around in TOLD.items()}
    told["megatron_micro_step_number"] = 1
    lines = printed(capsys, pair(tmp_path, LINEAR.format(1), told))
    assert lines[0].startswith("First to part: model.k (Functional.linear),")


def test_the_diagnosis_and_python_name_it_too(tmp_path: Path) -> None:
    command = pair(tmp_path, LINEAR.format(1), TOLD)
    assert main([*command, "-q"]) == 0
    assert main(["diagnose", str(tmp_path / "out"), "-q"]) == 0
    first = json.loads((tmp_path / "out/diagnosis.json").read_text())["first"]
    assert (first["module"], first["operator"]) == ("model.k", "Functional.linear")
    found = rlprobe.compare_dumps(tmp_path / "b", tmp_path / "t")
    assert found.first is not None and found.first["within"] == "model.k"
    within = dict(found.judged.select("name", "within").iter_rows())
    assert within[f"{SOFTMAX}.output.0"] == "model"
    assert within[f"{Q}.output.0"] == "model"


def test_dumps_that_changed_in_between_are_looked_up_again(tmp_path: Path) -> None:
    pair(tmp_path, SECOND, TOLD)
    assert (
        rlprobe.compare_dumps(tmp_path / "b", tmp_path / "t").judged.get_column("rank").max() == 0
    )
    for side, data in (("b", attention()), ("t", attention(FIRST))):
        directory = tmp_path / side / "actor_update/step0/rank1"
        dumps.write(directory, data)
        (directory / "construct.json").write_text(json.dumps(TOLD))
    judged = rlprobe.compare_dumps(tmp_path / "b", tmp_path / "t").judged
    of_functions = judged.filter((pl.col("rank") == 1) & pl.col("module").is_null())
    assert of_functions.get_column("within").null_count() == 0 < of_functions.height


def test_a_side_that_is_gone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair(tmp_path, SECOND, TOLD), "-q"]) == 0
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    assert main(["diagnose", str(tmp_path / "out"), "--no-fail"]) == 0
    said = capsys.readouterr().err
    assert "told by their order alone" in said and str(tmp_path / "b") in said


def test_a_stored_runs_file_is_checked_like_any_other_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlprobe.dumps import records

    pair(tmp_path / "tree", LINEAR.format(1), TOLD)
    for side in "bt":
        run = tmp_path / side
        (run / "records").mkdir(parents=True)
        (tmp_path / "tree" / side).rename(run / "dump")
        frame = records.build(run / "dump/actor_update", "actor_update")
        records.write(frame, run / "records/actor_update.parquet")
        list_files(run)
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]
    assert printed(capsys, command)[0].startswith("First to part: model.k (Functional.linear),")
    (tmp_path / "b/dump/actor_update/step0/rank0/construct.json").write_text("{}")
    capsys.readouterr()
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("First to part: model.k")  # the target says it as well
    assert "is not what was committed" in shown.err


FIRST, SECOND = LINEAR.format(0), LINEAR.format(1)
#: Files that somebody made, and how they are refused.
HOSTILE: dict[str, tuple[str, str | None]] = {
    "cut": ('{"a": "b', "is not an msprobe construct file"),
    "a list": ("[]", "is not an msprobe construct file"),
    "no text": ("\udcff", "is not an msprobe construct file"),
    "deep": ('{"d": ' + "[" * 100_000 + "}", "is not an"),
    "in a circle": (json.dumps({Q: K, K: Q, SECOND: Q, FIRST: FIRST}), None),
    "numbers": (json.dumps({SECOND: 7, Q: True, K: {"a": 1}, SOFTMAX: [], FIRST: [[]]}), None),
    "a million digits": ('{"a": ' + "9" * 1_000_000 + "}", None),
    "later than itself": (json.dumps({ATTENTION: FIRST, SECOND: ATTENTION}), None),
    "no names": (json.dumps({SECOND: "", FIRST: "\x1b[31m", SOFTMAX: "x" * 999}), None),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_of_anybodys_costs_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    text, refused = HOSTILE[what]
    command = pair(tmp_path, LINEAR.format(1), None)
    for side in "bt":
        file = tmp_path / side / "actor_update/step0/rank0/construct.json"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("First to part: ")
    assert "\x1b" not in shown.out and max(map(len, shown.out.splitlines())) < 400
    if refused is not None:
        assert refused in shown.err and "told by their order alone" in shown.err
        with pytest.raises(DumpError, match=refused):
            construct.read(tmp_path / "b/actor_update/step0/rank0/construct.json")


def test_a_call_is_inside_those_alone_that_end_after_it(tmp_path: Path) -> None:
    """A file that goes round in circles, or backwards, nests nothing in itself."""
    assert main([*pair(tmp_path, SECOND, None), "-q"]) == 0
    rows = pl.read_parquet(tmp_path / "out/actor_update/records.parquet")
    for around in ({Q: K, K: Q, FIRST: Q}, {ATTENTION: FIRST, SOFTMAX: ATTENTION}, {Q: Q}, TOLD):
        _, calls = execution.timeline(rows, Told("benchmark", around))
        for number, inner in enumerate(calls):
            assert inner.parent is None or inner.parent > number
            assert inner.start <= inner.first
    told = {
        one.number: calls[one.parent or 0].module
        for one in calls
        if one.operator == "Functional.linear"
    }
    assert told == {0: "model.q", 1: "model.k"}


def test_calls_around_a_call_end_where_they_come_round_again() -> None:
    assert construct.around({"a": "b", "b": "c", "c": "a"}, "a") == ["b", "c", "a"]
    assert construct.around({"a": "a"}, "a") == ["a"]
    assert construct.around({str(n): str(n + 1) for n in range(1000)}, "0")[-1] == "64"
    assert construct.around({}, "a") == []
