"""Small models and short sessions for the tests of capture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture.recorder import Recorder
from rlprobe.capture.session import CaptureOptions, Session

UPDATE = "actor_update"


class Block(nn.Module):
    """A residual block: attention-like mixing, a gated MLP, a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


class Tiny(nn.Module):
    """Embedding, two blocks, a head."""

    def __init__(self, width: int = 24, vocabulary: int = 40, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(build: Callable[[], nn.Module] = Tiny) -> nn.Module:
    torch.manual_seed(0)
    return build()


def tokens() -> Tensor:
    return torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(1))


def session(root: Path, **options: Any) -> Session:
    """A session that captures the update stage of steps 0..9 below ``root``."""
    chosen = {
        "stages": (UPDATE, "actor_compute_log_prob"),
        "step_end": 9,
        "provenance": False,
        **options,
    }
    return Session(
        "benchmark", "verl", str(root / "dump"), str(root / "side"), CaptureOptions(**chosen)
    )


def recorder(root: Path, **options: Any) -> Recorder:
    return Recorder(session(root, **options), role="actor", rank=0, world_size=1)


def rank_dir(root: Path, stage: str = UPDATE, step: int = 0) -> Path:
    return root / "dump" / stage / f"step{step}" / "rank0"


def dump(root: Path, stage: str = UPDATE, step: int = 0, name: str = "dump.json") -> dict[str, Any]:
    """The records of a dump or debug file."""
    document = json.loads((rank_dir(root, stage, step) / name).read_text(encoding="utf-8"))
    data: dict[str, Any] = document["data"]
    return data


def leaves(value: Any) -> list[dict[str, Any]]:
    """All tensor leaves of a nest."""
    if isinstance(value, dict):
        if "dtype" in value:
            return [value]
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def hooks_of(model: nn.Module) -> list[str]:
    """Every hook found on a model's modules and parameters."""
    found = []
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            if getattr(module, kind):
                found.append(f"{name}.{kind}")
        if "forward" in vars(module):
            found.append(f"{name}.forward")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            found.append(name)
    return found
