"""What stands beside the parameters: is each buffer recorded, under its name, as it is?"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from rlprobe.capture import buffers  # noqa: E402
from rlprobe.capture.weights import digest  # noqa: E402
from tests.unit.test_slime_megatron_names import chunk  # noqa: E402

pytestmark = pytest.mark.slow


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(1.0, 9.0) ** -1, persistent=False)
        self.register_buffer("mask", torch.ones(3, 3).triu().bool())
        self.register_buffer("never", torch.full((2,), -torch.inf))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = Rotary()
        self.up = nn.Linear(2, 2)
        self.up.note = torch.ones(1)  # no buffer, and no Megatron's


def test_every_buffer_has_name_format_digest_and_sketch() -> None:
    model = Model()
    found = {row["name"]: row for row in buffers.describe([model], with_sketch=True)}
    assert found.keys() - {"rotary_emb.empty"} == {
        f"rotary_emb.{name}" for name in ("inv_freq", "mask", "never")
    }
    table = found["rotary_emb.inv_freq"]
    assert table["digest"] == digest(model.rotary_emb.inv_freq)
    assert table["dtype"] == "torch.float32" and table["shape"] == [8]
    assert table["norm"] == pytest.approx(float(model.rotary_emb.inv_freq.norm()))
    assert len(table["sketch"]) == 61
    # truth values and what is not finite have digests alone
    assert found["rotary_emb.mask"]["sketch"] is None
    assert found["rotary_emb.never"]["sketch"] is None and found["rotary_emb.never"]["norm"] is None
    assert buffers.describe([model], with_sketch=False)[0]["sketch"] is None


def test_wrappers_are_no_part_of_a_name() -> None:
    compiled = nn.Module()
    compiled._orig_mod = Model()
    compiled.__class__ = type("OptimizedModule", (nn.Module,), {})
    assert "rotary_emb.inv_freq" in dict(buffers.held([compiled]))


def test_megatrons_frequencies_are_plain_attributes() -> None:
    model = chunk([0])
    model.rotary_pos_emb = nn.Module()
    model.rotary_pos_emb.inv_freq = torch.ones(4)
    model.rotary_pos_emb._kept = torch.ones(4)  # what it remembers is its own
    model.output_layer.scratch = torch.ones(4)  # beside parameters lie other things too
    assert [name for name, _ in buffers.held([model])] == ["model.rotary_emb.inv_freq"]
