"""The blind pass over what a run says of its software and of its framework's settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlprobe.judge import reasons
from rlprobe.selftest.blind import disturb, quantities, told
from rlprobe.selftest.blind.disturb import UnchangedError

PROCESS = {
    "device": "cpu", "switches": {"tf32": False}, "code": {"verl": "a"}, "dropout": {},
    "threads": {"cpus": 2}, "determinism": {"late": [], "seed": 0},
}  # fmt: skip
LINE = {
    "role": "actor", "rank": 0, "step": 1, "parameters": 27, "optimizer": "AdamW", "rounded": [],
    "generators": None, "left": {"compared": 27, "moved": 0},
}  # fmt: skip
CONFIGURATION = {"trainer": {"project_name": "x"}, "actor": {"optim": {"lr": 1e-3}, "loss": None}}


@pytest.fixture
def target(tmp_path: Path) -> Any:
    (tmp_path / "dump").mkdir()
    environment = {"actor-rank0": PROCESS, "ref-rank0": PROCESS}
    (tmp_path / "environment.json").write_text(json.dumps({"processes": environment}))
    (tmp_path / "dump/configurations.json").write_text(json.dumps(CONFIGURATION))
    (tmp_path / "joined.json").write_text(json.dumps({"format": 1, "joined": [LINE]}))
    return SimpleNamespace(
        path=tmp_path,
        joined=lambda: [LINE],
        has=lambda name: True,
        checked=lambda name: tmp_path / name,
        environment=lambda: environment,
    )


def test_every_leaf_is_a_quantity_and_what_is_not_judged_has_its_reason(target: Any) -> None:
    found = {one.name: one.declared for one in told.of(target)}
    assert len(found) == 2 * (1 + 7) + 3 + 9
    assert found["processes.actor-rank0"] is None and found["actor.optim.lr"] is None
    assert found["processes.ref-rank0.switches.tf32"] is None
    assert found["processes.ref-rank0.threads.cpus"] == reasons.INTENDED
    assert found["trainer.project_name"] == reasons.HARMLESS
    assert found["actor.loss"] is None, "what may matter is said"
    code = next(one for one in told.of(target) if one.name.endswith("code.verl"))
    assert told.judges(code, quantities.MISSING) == reasons.UNIMPORTED
    assert told.judges(code, quantities.TEN_FLOORS) is None


@pytest.mark.parametrize(
    ("leaf", "way", "new"),
    [
        ("parameters", "ten_floors", 28),
        ("parameters", "zero", 0),
        ("left.moved", "ten_floors", 1),
        ("left.moved", "zero", None),
        ("optimizer", "zero", ""),
        ("rounded", "ten_floors", ["disturbed"]),
        ("rounded", "missing", None),
        ("generators", "ten_floors", "disturbed"),
        ("generators", "missing", None),
    ],
)
def test_what_a_process_says_that_it_loaded_is_disturbed_leaf_by_leaf(
    target: Any, leaf: str, way: str, new: Any
) -> None:
    one = next(one for one in told.of(target) if one.name == f"joined.0.{leaf}")
    assert one.declared is None and way in quantities.WAYS[one.kind]
    if new is None:
        with pytest.raises(UnchangedError):
            disturb.contents(target.path, one, way)
        return
    (data,) = disturb.contents(target.path, one, way).values()
    line = json.loads(data or b"")["joined"][0]
    own = json.loads(json.dumps(LINE))
    first, _, last = leaf.partition(".")
    if last:
        own[first][last] = new
    else:
        own[first] = new
    assert line == own


@pytest.mark.parametrize(
    ("name", "way", "new"),
    [
        ("processes.actor-rank0.switches.tf32", "ten_floors", True),
        ("processes.actor-rank0.switches.tf32", "missing", None),
        ("processes.actor-rank0.dropout", "ten_floors", {"disturbed": 0.1}),
        ("processes.actor-rank0.determinism.late", "ten_floors", ["disturbed"]),
        ("processes.actor-rank0.determinism.seed", "ten_floors", 0.1),
        ("processes.actor-rank0", "missing", None),
        ("actor.optim.lr", "ten_floors", 1.1e-3),
        ("actor.loss", "ten_floors", "disturbed"),
        ("trainer.project_name", "ten_floors", "x disturbed"),
    ],
)
def test_one_leaf_is_disturbed_and_all_others_stay(
    target: Any, name: str, way: str, new: Any
) -> None:
    one = next(one for one in told.of(target) if one.name == name)
    before = json.loads((target.path / one.file).read_bytes())
    (data,) = disturb.contents(target.path, one, way).values()
    assert data is not None
    after = json.loads(data)
    *path, last = json.loads(one.key)
    for key in path:
        before_inner, after_inner = before[key], after[key]
        assert {k: v for k, v in before.items() if k != key} == {
            k: v for k, v in after.items() if k != key
        }
        before, after = before_inner, after_inner
    assert (
        after.get(last) == pytest.approx(new)
        if isinstance(new, float)
        else (after.get(last) == new)
    )
    assert (last in after) == (way != "missing")


@pytest.mark.parametrize(
    ("name", "way"),
    [("processes.actor-rank0.dropout", "missing"), ("processes.actor-rank0", "ten_floors")],
)
def test_what_says_no_less_without_it_is_not_disturbed(target: Any, name: str, way: str) -> None:
    one = next(one for one in told.of(target) if one.name == name)
    with pytest.raises(UnchangedError):
        disturb.contents(target.path, one, way)


def test_floors_are_told_anew_where_a_device_or_its_switches_change(target: Any) -> None:
    found = {one.name: told.of_floors(one) for one in told.of(target)}
    assert found["processes.actor-rank0"] and found["processes.ref-rank0.switches.tf32"]
    assert found["processes.ref-rank0.device"] and not found["processes.ref-rank0.threads.cpus"]
    assert not found["actor.optim.lr"]
