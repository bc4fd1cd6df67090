"""What a model keeps beside its parameters, as a captured stage records it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlprobe.capture import buffers

pytestmark = pytest.mark.slow


class Table(nn.Module):
    """Frequencies as Megatron keeps them: a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = 1e4 ** -(torch.arange(8) / 8)
        self.scale = 2.0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.view = self.weight.detach()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1), persistent=False)
        self.register_buffer("nothing", None)


class Flat(nn.Module):
    """Without parameters of its own: what it has are views of another's (FSDP1)."""

    def __init__(self, whole: nn.Parameter) -> None:
        super().__init__()
        with torch.no_grad():
            self.weight = whole[:2]
        self.given = whole * 2


def model() -> nn.Module:
    found = nn.Module()
    found.rotary_emb, found.norm = Table(), Normed()
    found.flat = Flat(found.norm.weight)
    found.again = nn.Module()
    found.again.inv_freq = found.rotary_emb.inv_freq
    return found


def described(found: nn.Module, with_sketch: bool = True) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in buffers.describe([found], with_sketch)}


def test_registered_buffers_and_plain_tensors_of_what_has_no_parameters() -> None:
    found = described(model())
    assert list(found) == ["rotary_emb.inv_freq", "norm.mean", "norm.mask"]
    assert all(one["logical"] for one in found.values())
    assert found["rotary_emb.inv_freq"]["dtype"] == "torch.float32"
    # not finite: the digest alone says what it is
    assert (found["norm.mask"]["norm"], found["norm.mask"]["sketch"]) == (None, None)


def test_a_format_shows_in_dtype_digest_and_sketch() -> None:
    before, other = model(), model()
    other.rotary_emb.inv_freq = other.rotary_emb.inv_freq.bfloat16()
    left, right = (described(one)["rotary_emb.inv_freq"] for one in (before, other))
    assert (left["dtype"], right["dtype"]) == ("torch.float32", "torch.bfloat16")
    assert left["digest"] != right["digest"]
    apart = math.dist(left["sketch"], right["sketch"]) / left["norm"]
    assert 1e-4 < apart < 1e-2
    assert described(before, with_sketch=False)["rotary_emb.inv_freq"]["sketch"] is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float64])
def test_every_type_has_a_digest(dtype: torch.dtype) -> None:
    found = nn.Module()
    found.inner = nn.Module()
    values: Tensor = torch.ones(3).to(dtype)
    found.inner.register_buffer("kept", values)
    one = described(found)["inner.kept"]
    assert one["digest"].startswith("sha256:") and one["dtype"] == str(dtype)
