"""Processes whose numbers say nothing: paired by what they were given, or said to be a guess?"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlprobe.compare import sides
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor
from tests.unit.sides_helpers import paired, put


def test_processes_without_ranks_are_paired_by_what_they_were_given(tmp_path: Path) -> None:
    for pid, top in ((101, 1.0), (102, 2.0), (103, 3.0)):
        put(tmp_path / "b", f"step0/proc{pid}", top)
    for pid, top in ((201, 3.0), (202, 1.0 + 1e-6), (203, 2.0)):
        put(tmp_path / "t", f"step0/proc{pid}", top)
    found, notes = paired(tmp_path)
    assert found == [
        ("step0/proc101", "step0/proc202"),
        ("step0/proc102", "step0/proc203"),
        ("step0/proc103", "step0/proc201"),
    ]
    (note,) = notes
    assert "paired by what they were given (proc101 with proc202" in note


@pytest.mark.parametrize("given", [(1, 2), ("first", "second"), (0.5, 0.25), (10**20, 10**20 + 1)])
def test_arguments_that_are_no_tensors_tell_processes_apart(
    tmp_path: Path, given: tuple[object, object]
) -> None:
    """They were called a guess that "nothing they were given tells apart"."""
    for side, order in (("b", given), ("t", given[::-1])):
        for pid, value in enumerate(order):
            data = {"Torch.f.0.forward": call([scalar(value)], [tensor()])}
            dumps.write(tmp_path / side / f"step0/proc{pid}", data)
    found, notes = paired(tmp_path)
    assert found == [("step0/proc0", "step0/proc1"), ("step0/proc1", "step0/proc0")]
    assert "guess" not in "".join(notes)


def test_processes_that_nothing_tells_apart_are_a_guess_and_said_to_be(tmp_path: Path) -> None:
    for name in "bt":
        for pid in (1, 2):
            put(tmp_path / name, f"step0/proc{pid}", 1.0)
    found, notes = paired(tmp_path)
    assert found == [("step0/proc1", "step0/proc1"), ("step0/proc2", "step0/proc2")]
    assert len(notes) == 1 and "which is a guess" in notes[0]


def test_processes_that_are_about_as_near_to_either_are_a_guess(tmp_path: Path) -> None:
    """Other batches on both sides: the nearest is no counterpart."""
    for name, tops in (("b", (1.0, 1.02)), ("t", (1.01, 1.03))):
        for pid, top in enumerate(tops):
            put(tmp_path / name, f"step0/proc{pid + 1}", top)
    _, notes = paired(tmp_path)
    assert len(notes) == 1 and "which is a guess" in notes[0]


def test_a_process_more_stays_alone(tmp_path: Path) -> None:
    for pid, top in ((1, 1.0), (2, 2.0)):
        put(tmp_path / "b", f"step0/proc{pid}", top)
    for pid, top in ((7, 9.0), (8, 2.0), (9, 1.0)):
        put(tmp_path / "t", f"step0/proc{pid}", top)
    found, notes = paired(tmp_path)
    assert found == [
        ("step0/proc1", "step0/proc9"), ("step0/proc2", "step0/proc8"), ("", "step0/proc7")
    ]  # fmt: skip
    assert "guess" not in "".join(notes)


def test_ranks_meet_processes_without_ranks_by_content(tmp_path: Path) -> None:
    """One side had a process group, the other none."""
    for rank, top in ((0, 1.0), (1, 2.0)):
        put(tmp_path / "b", f"step0/rank{rank}", top)
        put(tmp_path / "t", f"step0/proc{9 - rank}", top)
    found, _ = paired(tmp_path)
    assert found == [("step0/rank0", "step0/proc9"), ("step0/rank1", "step0/proc8")]


@pytest.mark.parametrize("above", ["", "actor_generate_sequences/"])
def test_directories_of_process_numbers_are_looked_through(tmp_path: Path, above: str) -> None:
    """An engine of two tensor-parallel ranks: a directory each, named by its process."""
    for name, pids in (("b", (11, 12)), ("t", (22, 21))):
        for rank, pid in enumerate(pids):
            put(tmp_path / name, f"{above}{pid}/step0/rank{rank}", 1.0)
    found, notes = paired(tmp_path)
    assert found == [
        (f"{above}11/step0/rank0", f"{above}22/step0/rank0"),
        (f"{above}12/step0/rank1", f"{above}21/step0/rank1"),
    ]
    assert notes == []


def test_stages_below_process_numbers_are_joined(tmp_path: Path) -> None:
    for name, pids in (("b", (11, 12)), ("t", (22, 21))):
        for rank, pid in enumerate(pids):
            put(tmp_path / name, f"{pid}/actor_update/step0/rank{rank}", 1.0)
    both = [sides.resolve(str(tmp_path / name)) for name in "bt"]
    assert [list(side.stages) for side in both] == [["actor_update"]] * 2
    assert [len(side.stages["actor_update"].processes) for side in both] == [2, 2]


def test_engines_that_number_their_ranks_alike_are_told_by_what_they_were_given(
    tmp_path: Path,
) -> None:
    """Two engines of one rank each: rank 0 is there twice, so it names neither."""
    for pid, top in ((11, 1.0), (12, 2.0)):
        put(tmp_path / "b", f"{pid}/step0/rank0", top)
    for pid, top in ((21, 2.0), (22, 1.0)):
        put(tmp_path / "t", f"{pid}/step0/rank0", top)
    found, notes = paired(tmp_path)
    assert found == [("11/step0/rank0", "22/step0/rank0"), ("12/step0/rank0", "21/step0/rank0")]
    assert "11/rank0 with 22/rank0" in notes[0]
