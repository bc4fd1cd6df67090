"""Dump one training step of a tiny model with msprobe itself.

usage: dump_model.py OUT TASK SUMMARY_MODE SCALE    (one configuration a process: the debugger is
a singleton). SCALE multiplies one weight.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from msprobe.pytorch import PrecisionDebugger, seed_all
from torch import nn


class Block(nn.Module):
    """Attention with a mask, a gated MLP and norms: functions, modules and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.down = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 0.25) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) * scale + mask, -1)
        return x + self.down(nn.functional.silu(weights @ v))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        low = torch.finfo(torch.float32).min
        mask = torch.full((tokens.shape[1],) * 2, low).triu(1)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return {"logits": self.head(x)}


def main(out: str, task: str, mode: str, scale: str) -> None:
    config = Path(f"{out}.json")
    settings = {"task": task, "dump_path": out, "rank": [], "step": [], "level": "mix"}
    config.write_text(json.dumps({**settings, task: {"summary_mode": mode}}))
    seed_all(seed=1234, mode=True)
    debugger = PrecisionDebugger(config_path=str(config))
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.layers[1].down.weight.mul_(float(scale))
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    debugger.start(model=model)
    logits = model(tokens)["logits"]
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
