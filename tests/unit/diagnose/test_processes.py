"""What processes recorded of their software, where all of them together say the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlprobe.diagnose.gate import settings
from rlprobe.diagnose.gate.processes import unlike, unrecorded

OFF = {"allow_tf32_matmul": False, "deterministic_algorithms": True}
ON = {**OFF, "allow_tf32_matmul": True}
LESS = {"deterministic_algorithms": True}


def side(device: str = "cpu", torch: str = "2.13", layout: Any = None, **roles: Any) -> Any:
    """A run of these roles' processes, each with its switches; ``_1`` ends a second rank's name."""
    environment = {}
    for name, switches in roles.items():
        role, _, rank = name.partition("_")
        environment[f"{role}-rank{rank or 0}"] = {
            "device": device, "switches": switches, "versions": {"torch": torch},
            "code": {"verl": "a" * 64},
        }  # fmt: skip
    names = environment if layout is None else layout
    parts = [name.rpartition("-rank") for name in names]
    return SimpleNamespace(
        key="k",
        environment=lambda: environment,
        manifest=SimpleNamespace(
            declared={"precision": "fp32"},
            layout=[SimpleNamespace(role=role, rank=int(rank)) for role, _, rank in parts],
        ),
    )


def gate(benchmark: Any, target: Any) -> Any:
    return SimpleNamespace(
        benchmark=benchmark, target=target, controls={}, step=SimpleNamespace(findings={})
    )


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        (side(actor=OFF, critic=OFF), side(actor=OFF, critic=OFF), ""),
        (side(actor=OFF, critic=OFF), side(actor=OFF, critic=ON), "allow_tf32_matmul"),
        # all processes together say the same
        (side(actor=ON, critic=OFF), side(actor=OFF, critic=ON), "(actor): True -> False"),
        (side(actor=OFF, critic=OFF), side(actor=OFF, critic=LESS), "(critic): False -> (absent)"),
        (side(actor=OFF, actor_1=OFF), side(actor=OFF, actor_1=LESS), "(absent)"),
        (side(actor=LESS, actor_1=LESS), side(actor=LESS, actor_1=LESS), ""),
        # one kind of device has all its switches
        (side(actor=OFF), side(actor=LESS), "allow_tf32_matmul"),
        (side(actor=OFF), side("npu", actor=LESS), ""),
        (side(actor=OFF), side(torch="2.1", actor=LESS), ""),
        (side(actor=ON), side("npu", actor=LESS), "allow_tf32_matmul"),
        # other roles, and ranks, are another layout
        (side(actor=OFF, rollout=ON), side(actor=OFF, actor_1=OFF, rollout=ON), ""),
    ],
)
def test_switches_are_held_against_each_other_role_by_role(
    benchmark: Any, target: Any, said: str
) -> None:
    item = settings._precision(gate(benchmark, target))
    assert said in str(item.evidence) and (item.state == "caveat") == bool(said), item


def test_a_version_that_one_process_lacks_is_said() -> None:
    left, right = side(actor=OFF, critic=OFF), side(actor=OFF, critic=OFF)
    assert settings._versions(gate(left, right)).state == "open"
    del right.environment()["critic-rank0"]["versions"]["torch"]
    assert unlike(left, right, "versions") == ["torch (critic): 2.13 -> (absent)"]
    item = settings._versions(gate(left, right))
    assert item.state == "caveat" and "torch (critic)" in item.evidence


def test_a_process_that_recorded_nothing_is_named() -> None:
    lost = side(layout=["actor-rank0", "critic-rank0"], actor=OFF)
    assert unrecorded(lost) == ["critic-rank0"] and unrecorded(side(layout=["actor-rank0"])) == []
    item = settings._versions(gate(side(actor=OFF), lost))
    assert item.state == "caveat" and "not recorded by critic-rank0 of the target" in item.evidence


def test_code_that_one_side_alone_recorded_is_said() -> None:
    without = side(actor=OFF)
    without.environment()["actor-rank0"]["code"] = {}
    for pair, said in (
        ((side(actor=OFF), without), "the target did not record its code"),
        ((without, side(actor=OFF)), "the benchmark did not record its code"),
    ):
        item = settings._code(gate(*pair))
        assert item.state == "caveat" and said in item.evidence
    assert settings._code(gate(without, without)).state == "open"
