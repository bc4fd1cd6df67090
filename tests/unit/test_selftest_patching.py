"""Does ``swapped`` put everything back as it was, wherever the attribute lives?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlprobe.faults.patching import output_of, swapped


class _Base:
    shared = "of the class"

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    def method(self) -> str:
        return f"method of {type(self).__name__}"


class _Owner(_Base):
    __slots__ = ("slot",)

    def __init__(self) -> None:
        self._stored = "right"
        self.plain = "right"
        self.slot = "right"

    @property
    def described(self) -> str:
        return self._stored

    @described.setter
    def described(self, value: str) -> None:
        self._stored = value


@pytest.mark.parametrize("name", ["plain", "described", "slot", "shared", "method"])
def test_an_attribute_of_an_instance(name: str) -> None:
    owner = _Owner()
    before, old = dict(vars(owner)), getattr(owner, name)
    with swapped(owner, name, "wrong"):
        assert getattr(owner, name) == "wrong"
    assert getattr(owner, name) == old
    assert vars(owner) == before


@pytest.mark.parametrize("kind", [_Base, _Owner])
@pytest.mark.parametrize("name", ["shared", "double", "method"])
def test_an_attribute_of_a_class_or_of_its_base(kind: type, name: str) -> None:
    before = dict(vars(kind))
    with swapped(kind, name, "wrong"):
        assert getattr(kind, name) == "wrong"
    assert dict(vars(kind)) == before
    assert kind().double(4) == 8


def test_what_a_torch_module_registers_and_a_file_and_a_mapping() -> None:
    layer = torch.nn.Linear(2, 2)
    weight, forward = layer.weight, layer.forward
    entries: dict[str, Any] = {"a": 1}
    with (
        swapped(layer, "weight", torch.nn.Parameter(torch.zeros(2, 2))),
        swapped(layer, "forward", lambda x: x),
        swapped(math, "pi", 3),
        swapped(entries, "a", 2),
    ):
        assert not layer.weight.any()
        assert layer(7) == 7
        assert (math.pi, entries["a"]) == (3, 2)
    assert layer.weight is weight
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert "forward" not in vars(layer)
    assert layer.forward == forward
    assert (round(math.pi, 2), entries["a"]) == (3.14, 1)


def test_it_is_put_back_also_when_the_stage_fails() -> None:
    owner = _Owner()
    with pytest.raises(RuntimeError), swapped(owner, "described", "wrong"):
        raise RuntimeError
    assert owner.described == "right"


def test_a_changed_output_is_the_modules_own_to_every_hook() -> None:
    layer, seen = torch.nn.Linear(2, 2), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output), prepend=True)
    x = torch.ones(1, 2)
    with output_of(layer, lambda y: 2 * y):
        changed = layer(x)
    assert torch.equal(seen[0], changed)
    assert torch.equal(changed, 2 * layer(x))
    assert "forward" not in vars(layer)


def test_fault_files_of_earlier_versions_find_what_they_import() -> None:
    from rlprobe.faults import patching
    from rlprobe.selftest import patching as earlier

    for name in earlier.__all__:
        assert getattr(earlier, name) is getattr(patching, name)
