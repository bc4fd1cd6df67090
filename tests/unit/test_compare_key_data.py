"""Key data as others write them: other forms, odd files and numbers, and what is said of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.compare.samples.run import Samples
from rlprobe.dumps import key_names
from tests.unit.batches import (
    SAMPLES,
    compared,
    joined,
    log_probs,
    padded,
    save,
)


def single_save(data: Path, key: str, rows: Sequence[Sequence[float]], form: str) -> None:
    """One batch as msprobe's SingleSave, or the vendor's guide, has it: everything a float."""
    inner = data / key / "step0" / "rank0"
    if form in ("save", "guide", "list in micro-batch"):
        inner = inner / "micro_step0"
    inner.mkdir(parents=True)
    array = np.asarray(rows, dtype=np.float32)
    if form in ("list", "list in micro-batch"):
        for n, row in enumerate(array):
            np.save(inner / f"{key}.{n}.npy", row)
        (inner / f"{key}.json").write_text(json.dumps({"data": [{"max": 1.0}] * len(array)}))
        return
    name = f"{key.removesuffix('s')}0" if form == "guide" else key
    np.save(inner / f"{name}.npy", array)
    (inner / f"{name}.json").write_text(json.dumps({"data": {"max": 1.0, "shape": [2, 3]}}))


@pytest.mark.parametrize("form", ["save", "save_ex", "list", "list in micro-batch", "guide"])
def test_what_msprobes_own_single_save_leaves_is_joined(tmp_path: Path, form: str) -> None:
    """Token ids as floats, no micro-batch, a file a row, the guide's file names."""
    padded(tmp_path / "b/data", (0, 0), [1, 0], pad=3)
    ids = [SAMPLES[0], SAMPLES[1]]
    data = tmp_path / "t/data"
    single_save(data, "prompts", [[0] * (3 - len(p)) + p for p, _ in ids], form)
    single_save(data, "responses", [r + [0] * (3 - len(r)) for _, r in ids], form)
    mask = [[0] * (3 - len(p)) + [1] * (len(p) + len(r)) + [0] * (3 - len(r)) for p, r in ids]
    single_save(data, "attention_mask", mask, form)
    values = [[*log_probs(n), *[7.0] * (3 - len(r))] for n, (_, r) in enumerate(ids)]
    values[1][2] += 0.5
    single_save(data, "old_log_probs", values, form)
    table = joined(tmp_path)
    assert table["status"].unique().to_list() == ["matched"]
    found = table.filter(key="old_log_probs").sort("row_target")
    assert found["identical"].to_list() == [True, False]
    assert found["max_abs_err"].to_list() == [0.0, 0.5]
    assert found["max_abs_token"].to_list() == [None, 2]


def test_a_dict_of_tensors_is_a_key_each(tmp_path: Path) -> None:
    for side in "bt":
        padded(tmp_path / side / "data", (0, 0), [0, 1])
        inner = tmp_path / side / "data/aux/step0/rank0/micro_step0"
        inner.mkdir(parents=True)
        for name in ("router", "balance"):
            np.save(inner / f"aux.{name}.npy", np.ones((2, 1)) * (2 if side == "t" else 1))
    keys = compared(tmp_path)["keys"]
    assert keys["aux.router"]["matched"] == keys["aux.balance"]["matched"] == 2
    assert keys["aux.router"]["max_error"] == 1.0


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.array([[1.5, 2.0]]), "prompts holds 1.5; ids are whole numbers"),
        (np.array([[np.nan, 2.0]]), "prompts holds nan"),
        (np.array([[float(1 << 25), 2.0]], np.float32), "not known exactly"),
        (np.array([["a", "b"]]), "plain numbers"),
    ],
)
def test_a_key_that_is_refused_is_named_and_the_rest_compared(
    tmp_path: Path, ids: Any, said: str
) -> None:
    for side in "bt":
        padded(tmp_path / side / "data", (0, 0), [0], pad=3)
    place = tmp_path / "t/data/prompts/step0/rank0/micro_step0/prompts.npy"
    np.save(place, ids)
    found = compared(tmp_path)
    assert any(note.startswith("prompts, step 0: not compared") and said in note
               for note in found["notes"])  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("--map-step", "3:4")])
def test_key_data_alone_whose_steps_do_not_meet_say_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    padded(tmp_path / "b/data", (0, 0), [0])
    padded(tmp_path / "t/data", (0, 0), [0])
    for key in (tmp_path / "t/data").iterdir():
        (key / "step0").rename(key / "step7")
    (tmp_path / "b/data/prompts/step1").mkdir()
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o"), *arguments]) == 4
    said = capsys.readouterr().err
    assert "the benchmark has steps 0 to 1, the target 7" in said
    assert ("--map-step 3:4" if arguments else "--map-step 0:7") in said
    assert main(["compare", *sides, "-o", str(tmp_path / "o"), "--map-step", "0:7"]) == 0


@pytest.mark.parametrize("error", [0.0, 0.25])
def test_key_data_alone_are_what_is_said_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: float
) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1])
    padded(tmp_path / "t/data", (0, 0), [1, 0], error)
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "No records of modules or functions were compared."
    # nothing is said of records that neither side has
    told = said.out + said.err
    assert "0 records" not in told and "0.0 %" not in told and "records.parquet" not in told
    assert "  actor_compute_log_prob: key data alone" in lines
    assert lines[-1].endswith("o/actor_compute_log_prob/key_data.parquet")
    agree = "Key data that agree, by sample: attention_mask, old_log_probs, prompts, responses"
    assert (agree in lines) is (error == 0)
    assert ("Key data that part:" in lines) is (error > 0)


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_a_page_of_two_sides_that_nobody_judged_is_judged_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1])
    padded(tmp_path / "t/data", (0, 0), [1, 0], 0.25)
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o"), "-q"]) == 0
    assert main(["report", str(tmp_path / "o"), "--format", form]) == 0
    assert "has no diagnosis.json yet" in capsys.readouterr().err
    assert (tmp_path / f"o/report.{form}").is_file() and (tmp_path / "o/diagnosis.json").is_file()
    assert main(["report", str(tmp_path / "o"), "--format", form]) == 0
    assert "has no diagnosis.json yet" not in capsys.readouterr().err


def both_sides(tmp: Path) -> tuple[Path, Path]:
    """Key data of two samples, the same on both sides."""
    sides = tmp / "b/data", tmp / "t/data"
    for side in sides:
        padded(side, (0, 0), [0, 1])
    return sides


@pytest.mark.parametrize(
    ("dtype", "own", "other", "apart"),
    [
        (np.int64, 2**60, 2**60 + 1, 1.0),
        (np.int64, -(2**62), -(2**62) - 3, 3.0),
        (np.uint64, 2**64 - 1, 2**64 - 2, 1.0),
        (np.int64, 7, 7, 0.0),
        (np.int64, 2**60, 2**60 + 2**40, 2.0**40),
    ],
)
def test_whole_numbers_are_exact(
    tmp_path: Path, dtype: Any, own: int, other: int, apart: float
) -> None:
    sides = both_sides(tmp_path)
    for side, number in zip(sides, (own, other), strict=True):
        save(side, "index", (0, 0), np.array([[number], [5]], dtype))
    rows = joined(tmp_path).filter(key="index").sort("row_benchmark")
    assert rows["max_abs_err"].to_list() == [apart, 0.0]
    assert rows["identical"].to_list() == [apart == 0, True]
    assert (rows["error"][0] > 0) is (apart > 0)


@pytest.mark.parametrize(
    "names",
    [
        ["old_log_probs.npy", "micro_step0/old_log_probs.npy"],
        ["micro_step0/old_log_probs.npy", "micro_step0/old_log_probs.0.npy"],
        ["micro_step0/old_log_prob0.npy", "micro_step0/old_log_probs.0.npy"],
        ["old_log_probs.0.npy", "micro_step0/old_log_prob0.npy"],
    ],
)
def test_a_micro_batch_in_two_forms_is_named_and_not_chosen_from(
    tmp_path: Path, names: list[str]
) -> None:
    _, target = both_sides(tmp_path)
    place = target / "old_log_probs/step0/rank0"
    kept = np.load(place / "micro_step0/old_log_probs.npy")
    (place / "micro_step0/old_log_probs.npy").unlink()
    for number, name in enumerate(names):
        np.save(place / name, kept + number)
    found = compared(tmp_path)
    assert "old_log_probs" not in found["keys"] and found["keys"]["responses"]["identical"] == 2
    (note,) = found["notes"]
    assert note.startswith("old_log_probs, step 0: not compared: a micro-batch is there twice, as ")
    assert all(str(place / name) in note for name in names)


@pytest.mark.parametrize(
    "names", [["entropys.pt"], ["entropy.npy", "entropys.json"], ["e1.npy", "e2.npy", "f", "g"]]
)
def test_files_that_are_no_arrays_of_msprobe_are_named(tmp_path: Path, names: list[str]) -> None:
    for side in both_sides(tmp_path):
        place = side / "entropys/step0/rank0/micro_step0"
        place.mkdir(parents=True)
        for name in names:
            (place / name).write_bytes(b"")
    notes = compared(tmp_path)["notes"]
    assert [note.partition(" (")[0] for note in notes] == [
        f"entropys, step 0: not read of the {side}: no array entropys.npy or entropys.0.npy among "
        "its files"
        for side in ("benchmark", "target")
    ]
    assert names[0] in notes[0] and (", …" in notes[0]) is (len(names) > 3)


@pytest.mark.parametrize(
    ("key", "rows", "said"),
    [
        ("entropys", 1, "1 row in a micro-batch of 2 samples, rank 0, micro-batch 0"),
        ("entropys", 5, "5 rows in a micro-batch of 2 samples, rank 0, micro-batch 0"),
        # of another stage, which may cut its micro-batches otherwise
        ("update_log_probs", 1, "no tokens in their micro-batches, no mock proof"),
    ],
)
def test_rows_that_do_not_fit_their_micro_batch_say_so(
    tmp_path: Path, key: str, rows: int, said: str
) -> None:
    """As where a file of a list is lost: which of them belongs to which sample nobody knows."""
    benchmark, target = both_sides(tmp_path)
    save(benchmark, key, (0, 0), np.zeros((2, 2)))
    save(target, key, (0, 0), np.zeros((rows, 2)))
    (note,) = compared(tmp_path, key_names.stage_of(key))["notes"]
    assert f"({said}); they are not joined" in note


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        ([0], [0, 1], "step 1 is on the target only"),
        ([0, 2, 3], [0], "steps 2 to 3 are on the benchmark only"),
        ([0], [4], "step 0 of the benchmark is compared with step 4"),
        ([0], [0], None),
    ],
)
def test_steps_of_key_data_that_are_not_the_same_are_said(
    tmp_path: Path, benchmark: list[int], target: list[int], said: str | None
) -> None:
    sides = both_sides(tmp_path)
    for side, steps in zip(sides, (benchmark, target), strict=True):
        for key in side.iterdir():
            (key / "step0").rename(key / "first")
            for step in steps:
                shutil.copytree(key / "first", key / f"step{step}")
    notes = compared(tmp_path)["notes"]
    assert notes == ([] if said is None else [f"key data: {said}"])
    known = Samples(tmp_path / "b", tmp_path / "t").compare(stages.LOG_PROB, (str(said),))
    assert known is not None and known.summary["notes"] == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_both_sides_is_said_though_it_agrees(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for side in both_sides(tmp_path):
        save(side, "entropys", (0, 0), np.array([[1.0, value, 0, 0, 0, 0], [2.0, 3.0, 1, 0, 0, 0]]))
    argv = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "entropys (not finite on both sides at 1 of 5 values), " in said
    assert "old_log_probs (" not in said


@pytest.mark.parametrize(
    ("more", "table"),
    [(["--table"], True), (["--table", "both"], True), (["--stacks"], False), (["-q"], False)],
)
def test_no_option_makes_key_data_alone_incomparable(
    tmp_path: Path, more: list[str], table: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    both_sides(tmp_path)
    argv = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    result = tmp_path / "result.json"
    assert main([*argv, *more, "--json", str(result)]) == 0
    assert json.loads(result.read_text())["comparable"] is True
    assert ("there is no table" in capsys.readouterr().err) is table
    assert not list((tmp_path / "o").rglob("table.*"))


def numbers(data: Path, batches: Sequence[Sequence[int]], sound: bool = True) -> None:
    """The tokens of some micro-batches, and one number of each as a 0-d array."""
    for micro, samples in enumerate(batches):
        padded(data, (0, micro), samples)
        save(data, "loss", (0, micro), np.float32(sum(samples) + (0 if sound else 0.5)))


@pytest.mark.parametrize(
    ("one", "other", "sound", "counts"),
    [
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]], True, (2, 2)),
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]], False, (2, 0)),
        # micro-batches and their rows in another order hold the same samples
        ([[0, 1], [2, 3]], [[3, 2], [1, 0]], True, (2, 2)),
        ([[0], [1]], [[1], [0]], True, (2, 2)),
        ([[0, 1, 2, 3]], [[2, 3, 0, 1]], True, (1, 1)),
    ],
)
def test_one_number_of_a_micro_batch_is_of_all_its_samples(
    tmp_path: Path,
    one: list[list[int]],
    other: list[list[int]],
    sound: bool,
    counts: tuple[int, int],
) -> None:
    numbers(tmp_path / "b/data", one)
    numbers(tmp_path / "t/data", other, sound)
    found = compared(tmp_path)
    assert found["notes"] == []
    assert (found["keys"]["loss"]["matched"], found["keys"]["loss"]["identical"]) == counts


@pytest.mark.parametrize(
    ("one", "other", "alone", "said"),
    [
        ([[0, 1], [2, 3]], [[0], [1], [2], [3]], (2, 4), "2 numbers of the benchmark and 4 of"),
        ([[0, 1, 2, 3]], [[0, 1], [2, 3]], (1, 2), "1 number of the benchmark and 2 of"),
        # one of two micro-batches is the same
        ([[0, 1], [2, 3]], [[0, 1], [2], [3]], (1, 2), "1 number of the benchmark and 2 of"),
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]], (2, 2), "2 numbers of the benchmark and 2 of"),
    ],
)
def test_numbers_of_other_micro_batches_are_refused_by_name(
    tmp_path: Path, one: list[list[int]], other: list[list[int]], alone: tuple[int, int], said: str
) -> None:
    numbers(tmp_path / "b/data", one)
    numbers(tmp_path / "t/data", other)
    found = compared(tmp_path)
    key = found["keys"]["loss"]
    assert (key["benchmark_only"], key["target_only"]) == alone
    (note,) = found["notes"]
    assert note.startswith(f"loss, step 0: {said}")
    assert "other samples on the other side" in note


def test_a_number_of_a_micro_batch_without_tokens_says_that_nothing_names_it(
    tmp_path: Path,
) -> None:
    for side in "bt":
        save(tmp_path / side / "data", "loss", (0, 0), np.float32(1.5))
    found = compared(tmp_path)
    assert found["keys"]["loss"]["matched"] == 0
    (note,) = found["notes"]
    assert note.startswith("loss, step 0: 1 row of the benchmark and 1 of the target belong to")


@pytest.mark.parametrize("key", ["update_log_probs", "values", "token_level_rewards"])
def test_exit_code_4_names_key_data_that_nothing_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """Not what a dump without records would be told."""
    for side in "bt":
        save(tmp_path / side / "data", key, (0, 0), np.ones((2, 3)))
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 4
    said = capsys.readouterr().err.partition("rlprobe: error: ")[2]
    assert f"{key}, step 0: 2 rows of the benchmark and 2 of the target belong to samples" in said
    assert "nothing names the samples of these" in said
    assert "has no record at all" not in said
