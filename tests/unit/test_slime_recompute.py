"""Does a run that recomputes activations leave the records of one that does not?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlprobe import stages
from rlprobe.capture.recorder import Recorder
from rlprobe.capture.session import CaptureOptions, Session


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Two layers, run plainly or with their activations recomputed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            if self.how == "plain" or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def dump(tmp_path: Path, how: str, stage: str = stages.ACTOR_UPDATE) -> dict[str, Any]:
    """The records of two micro-batches of an update."""
    session = Session(
        role="benchmark",
        framework="slime",
        dump=str(tmp_path / how / "dump"),
        side=str(tmp_path / how / "side"),
        capture=CaptureOptions(stages=(stage,), provenance=False),
    )
    torch.manual_seed(0)
    model = Model(how)
    recorder = Recorder(session, role="actor", rank=0, world_size=1)
    with recorder.stage(stage, 0, 0, model):
        for micro_batch in range(2):
            x = torch.full((3, 4), 0.5 + micro_batch)
            if stage == stages.ACTOR_UPDATE:
                model(x).sum().backward()
            else:
                with torch.no_grad():
                    model(x)
    path = Path(session.dump) / stage / "step0" / "rank0" / "dump.json"
    found: dict[str, Any] = json.loads(path.read_text())["data"]
    return found


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_the_same_records_with_the_same_values(tmp_path: Path, how: str) -> None:
    plain, recomputed = dump(tmp_path, "plain"), dump(tmp_path, how)
    assert sorted(recomputed) == sorted(plain)
    # the reentrant form detaches a layer's input, so that alone has no gradient flag in common
    for name, entry in plain.items():
        ours = recomputed[name]
        if ".forward." in name:
            assert [leaf["Norm"] for leaf in ours["output"]] == [
                leaf["Norm"] for leaf in entry["output"]
            ], name
        elif ".parameters_grad." in name:
            assert ours == entry, name


def test_a_stage_without_gradients_has_every_call(tmp_path: Path) -> None:
    names = dump(tmp_path, "reentrant", stages.LOG_PROB)
    assert "Module.layers.1.up.Linear.forward.1" in names
