"""What does somebody who has two dumps and nothing else read on the screen?"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpyxl import load_workbook  # type: ignore[import-untyped]

from rlprobe.cli import main
from rlprobe.compare import lacking
from rlprobe.compare.lacking import Lacking
from rlprobe.judge import outline
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor


def leaf(top: float, shape: tuple[int, ...] = (4, 8)) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), shape)


def model(wrong: float = 0.0, layers: int = 4) -> dict[str, Any]:
    """Layers one after another; from the second on a share ``wrong`` too large."""
    data = {}
    for n in range(layers):
        given, made = (10.0 + n + k for k in (0, 1))
        if n > 1:
            given *= 1 + wrong
        if n >= 1:
            made *= 1 + wrong
        data[f"Module.model.layers.{n}.mlp.MLP.forward.0"] = call([leaf(given)], [leaf(made)])
    return data


def run(tmp_path: Path, benchmark: Any, target: Any, *more: str) -> list[str]:
    dumps.write(tmp_path / "b/actor_update/step0/rank0", benchmark, stack=True)
    dumps.write(tmp_path / "t/actor_update/step0/rank0", target, stack=True)
    return ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o"), *more]


def test_the_first_that_parts_comes_first_then_the_worst_the_counts_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = model(0.01)
    # a hundred times further off, and later: the worst, and not the first
    target["Module.model.layers.3.mlp.MLP.forward.0"] = call([leaf(13.13)], [leaf(28.0)])
    target["Module.model.extra.Extra.forward.0"] = call([leaf(1.0)], [leaf(1.0)])
    assert main(run(tmp_path, model(), target, "--coverage", "0.5")) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "First to part: model.layers.1.mlp (MLP), in actor_update, step 0, rank 0"
    assert lines[1].strip() == "Module.model.layers.1.mlp.MLP.forward.0.output.0"
    assert lines[2].strip().startswith("error at least 0.01,")
    assert "times what round-off allows" in lines[2]
    places = [out.index(part) for part in ("First to part", "the worst first:", "By status:",
                                           "Not compared", "Next:")]  # fmt: skip
    assert places == sorted(places)
    worst = lines[lines.index(next(x for x in lines if "the worst first" in x)) + 2]
    assert worst.endswith("Module.model.layers.3.mlp.MLP.forward.0.output.0")
    assert "2 records: the benchmark has no such record" in out
    assert f"rlprobe diagnose {tmp_path / 'o'}" in out


def test_equal_dumps_are_said_to_be_and_statistics_to_be_only_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run(tmp_path, model(), model())) == 0
    out = capsys.readouterr().out
    assert out.startswith("Nothing parts by more than round-off allows: 8 records judged.")
    assert "statistics cannot see a permutation" in out
    assert "worst" not in out


def embedded(ids: float = 9.0, weight: float = 1.0, made: float = 2.0) -> dict[str, Any]:
    given = tensor((ids, 0.0, None, None), (4, 8), "torch.int64")
    entry = call([given], [leaf(made)], parameters={"weight": leaf(weight)})
    return {"Module.model.embed.Embedding.forward.0": entry, **model()}


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize(
    ("given", "said"),
    [({"ids": 8.0}, "1 of 1 record of token ids differs, first Module.model.embed.Embedding."
      "forward.0.input.0; give both the same samples"),
     ({"weight": 1.001}, "1 of 1 recorded parameter differs, first Module.model.embed.Embedding."
      "forward.0.parameters.weight; give both the same checkpoint"),
     ({}, None)],
)  # fmt: skip
def test_what_the_sides_were_given_is_said_where_it_is_not_the_same(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, float],
    said: str | None,
    parts: bool,
) -> None:
    """Whatever is said to part first then follows from it."""
    target = embedded(**given, made=2.1 if parts else 2.0)
    assert main(run(tmp_path, embedded(), target)) == 0
    out = capsys.readouterr().out
    if said is None:
        assert "they were not given the same" not in out
    else:
        assert f"  they were not given the same: {said}" in out


def test_more_than_ten_are_ten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run(tmp_path, model(layers=20), model(0.01, layers=20))) == 0
    out = capsys.readouterr().out
    assert "The worst 10 of 37 beyond round-off:" in out
    assert out.count("Module.model.layers") == 11 + 1  # the first, ten, and what to dump again


def test_notes_are_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in "bt":
        for pid in (1, 2):
            dumps.write(tmp_path / side / f"step0/proc{pid}", model())
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(command) == 0
    assert "which is a guess" in capsys.readouterr().out


def test_too_many_records_to_judge_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing a hundred thousand records takes less time than judging them."""
    monkeypatch.setattr(outline, "MOST", 7)
    assert main(run(tmp_path, model(), model(0.01))) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 records, which are not judged here (more than 7):")
    assert f"rlprobe diagnose {tmp_path / 'o'}" in out and "matched 8" in out


@pytest.mark.parametrize("option", ["-q", "--no-fail"])
def test_quiet_and_jobs_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(run(tmp_path, model(), model(0.01), option)) == 0
    assert capsys.readouterr().out == ""


def stack(root: Path, name: str, frames: list[str]) -> None:
    text = json.dumps({"0": [[name], frames]})
    (root / "actor_update/step0/rank0/stack.json").write_text(text)


def test_stacks_show_who_called_on_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = run(tmp_path, model(), model(0.01), "--stacks")
    name = "Module.model.layers.1.mlp.MLP.forward.0"
    inner = "File torch/nn/modules/module.py, line 9, in _call_impl, \n return f()"
    stack(tmp_path / "b", name, [inner, "File modeling.py, line 7, in forward, \n y = mlp(x)"])
    stack(tmp_path / "t", name, ["File npu_patch.py, line 3, in forward, \n y = fused(x)"])
    assert main(command) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("benchmark:")
    assert lines[at : at + 4] == [
        "benchmark:", "File modeling.py, line 7, in forward, y = mlp(x)",
        "target:", "File npu_patch.py, line 3, in forward, y = fused(x)",
    ]  # fmt: skip
    assert "both sides: no stack was recorded" in lines
    # of the first, and once among the worst; what was done is not what to do next
    assert lines.count("benchmark:") == 2 and "called as one above" in lines
    assert not any("--stacks" in line for line in lines)


def test_the_table_has_stacks_as_csv_and_as_a_workbook(tmp_path: Path) -> None:
    assert main(run(tmp_path, model(), model(0.01), "--table", "both")) == 0
    directory = tmp_path / "o/actor_update"
    with (directory / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # msprobe has a call's stack once, at its first record
    assert rows[0]["NPU_Stack_Info"].startswith("File model.py, line 1")
    assert rows[1]["NPU_Stack_Info"] == ""
    sheet = load_workbook(directory / "table.xlsx").active
    cells = [[cell.value for cell in row] for row in sheet.iter_rows()]
    assert cells[0] == list(rows[0])
    assert [cell or "" for cell in cells[1]] == list(rows[0].values())


@pytest.mark.parametrize("kind", ["xlsx", "both"])
def test_without_what_writes_workbooks_nothing_is_begun(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openpyxl" else find(name)
    )
    assert main(run(tmp_path, model(), model(), "--table", kind)) == 1
    assert "`pip install openpyxl`" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert main(run(tmp_path, model(), model(), "--table", "csv")) == 0


def test_no_cell_of_a_workbook_is_a_formula(tmp_path: Path) -> None:
    data = {"=HYPERLINK(1).x.forward": call([leaf(1.0)], [])}
    assert main(run(tmp_path, data, data, "--table", "xlsx")) == 0
    sheet = load_workbook(tmp_path / "o/actor_update/table.xlsx").active
    assert sheet["A2"].value.startswith("=HYPERLINK") and sheet["A2"].data_type == "s"
    assert not (tmp_path / "o/actor_update/table.csv").exists()


FORMULAS = ["=HYPERLINK(1)", "+1+1", "-2+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "＝1"]


@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("where", ["name", "argument", "stack"])
def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path, where: str, text: str) -> None:
    """Names, texts and stacks are of whoever dumped; numbers stay as msprobe writes them."""
    name = f"{text}.x.forward.0" if where == "name" else "Module.x.Linear.forward.0"
    data = {name: call([scalar(text), leaf(1.0)], [])}
    argv = run(tmp_path, data, data, "--table", "csv")
    if where == "stack":
        for side in ("b", "t"):
            stack = tmp_path / side / "actor_update/step0/rank0/stack.json"
            stack.write_text(json.dumps({"0": [[name], [text]]}))
    assert main(argv) == 0
    with (tmp_path / "o/actor_update/table.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    cells = [cell for row in rows for cell in row]
    negative = [cell for cell in cells if re.fullmatch(r"-[0-9.e-]+", cell)]
    begins = tuple("=+-@\t\r＝")
    assert [cell for cell in cells if cell.startswith(begins)] == negative != []
    assert any(cell.startswith(f"'{text}") for cell in cells)


@pytest.mark.parametrize("slot", ["input", "output"])
def test_no_line_is_longer_than_somebody_would_read(
    tmp_path: Path, slot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module's path is in the name, in what parts first and in why."""
    name = "Module." + "block." * 500 + "Linear.forward.0"
    benchmark, target = (
        {name: call([leaf(top if slot == "input" else 1.0)], [leaf(top)])} for top in (5.0, 6.0)
    )
    assert main(run(tmp_path, benchmark, target)) == 0
    said = capsys.readouterr().out
    assert "…" in said and max(map(len, said.splitlines())) < 300


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (
            ["the target has no step 4", "the target has no step 5", "the target has no step 6"],
            ["6 records: the target has no steps 4 to 6; first: a"],
        ),
        (
            ["rank 0 of step 1 is gone", "rank 1 of step 1 is gone", "rank 1 of step 3 is gone"],
            [
                "4 records: rank 1 of steps 1 and 3 is gone; first: a",
                "2 records: rank 0 of step 1 is gone; first: a",
            ],
        ),
        (
            ["step 1 instead of step 2", "step 3 instead of step 4"],
            [
                "2 records: step 1 instead of step 2; first: a",
                "2 records: step 3 instead of step 4; first: a",
            ],
        ),
        (["shapes differ"], ["2 records: shapes differ; first: a"]),
    ],
)
def test_a_reason_of_many_steps_is_one_line(reasons: list[str], expected: list[str]) -> None:
    assert lacking.said([(reason, Lacking(2, "a", None)) for reason in reasons]) == expected


def test_several_ranks_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight ranks with one fault: ten records are listed, not ten ranks of two."""
    for rank in range(8):
        for side, wrong in (("b", 0.0), ("t", 0.01 + rank / 1000)):
            place = tmp_path / side / f"actor_update/step0/rank{rank}"
            dumps.write(place, model(wrong, layers=12))
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("The worst 10 of 21 beyond round-off, each of its worst rank:") + 2
    listed = [line.split("  ")[-1] for line in lines[at : at + 10]]
    assert len({line.rpartition(" ")[2] for line in listed}) == 10
    assert all(line.startswith("rank 7 and 7 more: ") for line in listed)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (None, (1e-6, 1e-5), "1e-06 against 1e-05, error 9, "),
        ("float64", (1e-6, 1e-5), "1e-06 against 1e-05, error 9, "),
        (None, (True, False), "True against False, error 1; there is no round-off in it"),
        (None, ("eager", "sdpa"), "eager against sdpa"),
        ("torch.Size", ([2, 3], [2, 4]), "[2, 3] against [2, 4]"),
    ],
)
def test_of_an_argument_both_values_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str | None, values: Any, said: str
) -> None:
    """They are exact, and no tensor of them could be dumped."""
    benchmark, target = (
        {"Functional.rms_norm.0.forward": call([leaf(1.0), scalar(value, kind)], [leaf(2.0)])}
        for value in values
    )
    assert main(run(tmp_path, benchmark, target)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].strip() == "Functional.rms_norm.0.forward.input.1"
    assert lines[2].strip().startswith(said)
    assert lines[4] == "" and lines[5] == "The only one beyond round-off:"
    assert not any("at least" in line or "see which elements" in line for line in lines)


def test_a_stage_of_one_is_named_in_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run(tmp_path, model(), model())) == 0
    assert f"every record: {tmp_path / 'o'}/actor_update/records.parquet" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]"])
@pytest.mark.parametrize("option", ["--stacks", "--table"])
def test_stacks_that_cannot_be_read_are_said_and_cost_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, option: str
) -> None:
    command = [*run(tmp_path, model(), model(0.01)), option]
    for side in "bt":
        (tmp_path / side / "actor_update/step0/rank0/stack.json").write_text(text)
    assert main(command) == 0
    said = capsys.readouterr()
    (line,) = [each for each in said.err.splitlines() if "stack.json" in each]
    assert line.count("stack.json is not an msprobe stack file") == 1 + (option == "--stacks")
    assert line.endswith("; nothing of it is shown")
    assert said.out.startswith("First to part: model.layers.1.mlp (MLP)")


@pytest.mark.parametrize("statistics", [True, False])
def test_tensor_files_that_were_not_copied_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statistics: bool
) -> None:
    """dump.json is small, its tensors are not: what is copied is often the first alone."""
    values = (1.0, -1.0, 0.25, 2.0) if statistics else (None,) * 4
    data = {"Functional.linear.0.forward": call([], [tensor(values, data_name="x.pt")])}
    assert main(run(tmp_path, data, data)) == (0 if statistics else 4)
    said = "".join(capsys.readouterr())
    assert "1 record names a tensor file of the benchmark, which has no dump_tensor_data" in said
    assert "1 record names a tensor file of the target" in said
    assert statistics or "copy the dumps again with dump_tensor_data" in said


@pytest.mark.parametrize("steps", [1, 3])
def test_of_several_steps_the_first_line_says_which_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    """The second step differs as updates make it differ: nobody shall read that nothing does."""
    for step in range(steps):
        for side, wrong in (("b", 0.0), ("t", 0.25 if step else 0.0)):
            dumps.write(tmp_path / side / f"actor_update/step{step}/rank0", model(wrong))
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 0
    said = capsys.readouterr().out
    alone = " in step 0, which alone is judged" if steps > 1 else ""
    assert said.startswith(f"Nothing parts by more than round-off allows{alone}: 8 records judged.")
    first = "step 1: 0.25, Module.model.layers.1.mlp.MLP.forward.0.output.0 of actor_update"
    assert (f"(the largest errors: {first}" in said) is (steps > 1)


def test_a_later_step_that_alone_parts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.5, 7: 0.0}
    for step, share in wrong.items():
        for side, own in (("b", 0.0), ("t", share)):
            dumps.write(tmp_path / side / f"actor_update/step{step}/rank0", model(own))
    assert main(["compare", *(str(tmp_path / s) for s in "bt"), "-o", str(tmp_path / "o")]) == 0
    said = capsys.readouterr().out
    assert "(the largest errors: step 3: 0.5, Module.model.layers.1.mlp" in said
    assert "; steps 1, 2 and 7: none);" in said


def test_a_step_of_one_side_is_not_said_to_have_been_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, steps in (("b", (0, 1, 5)), ("t", (0,))):
        for step in steps:
            dumps.write(tmp_path / side / f"actor_update/step{step}/rank0", model())
    assert main(["compare", *(str(tmp_path / s) for s in "bt"), "-o", str(tmp_path / "o")]) == 4
    said = capsys.readouterr().out
    assert "the target has no steps 1 and 5" in said and "were compared and not judged" not in said


#: A number that stands before the plural of what is counted.
PLURAL = re.compile(
    r"\b1 (?:records|rows|samples|checksums|steps|stages|ranks|values|calls|token sketches)\b"
)


@pytest.mark.parametrize("kind", ["statistics", "checksum", "key data", "alone"])
def test_one_of_a_thing_is_said_as_one(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "Module.a.Linear.forward.0"
    sides = {side: tmp_path / side / "actor_compute_log_prob/step0/rank0" for side in "bt"}
    for number, (side, directory) in enumerate(sides.items()):
        given = leaf(1.0 + number)
        if kind == "checksum":
            given = {k: v for k, v in given.items() if k[0].islower()} | {"md5": f"0a0b0c0{number}"}
        if kind == "key data":
            for key in ("prompts", "responses", "old_log_probs"):
                place = tmp_path / side / f"data/{key}/step0/rank0"
                place.mkdir(parents=True)
                np.save(place / f"{key}.npy", np.array([[1 + number * (key == "responses"), 2]]))
        more = {} if kind != "alone" or number else {"Module.b.Linear.forward.0": call([], [given])}
        dumps.write(directory, {name: call([], [given])} | more)
    argv = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(argv) in (0, 4)
    said = "".join(capsys.readouterr())
    assert re.search(r"\b1 (?:record|row|checksum|sample)\b", said) and not PLURAL.search(said)


@pytest.mark.parametrize("name", ["with space", "it's", "$(id)", "a;b"])
def test_commands_that_are_named_can_be_pasted(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = run(tmp_path, model(), model(0.01))
    argv[-1] = str(tmp_path / name)
    assert main(argv) == 0
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "rlprobe diagnose" in s]
    words = shlex.split(line)
    assert words[words.index("diagnose") + 1] == words[words.index("report") + 1] == argv[-1]
