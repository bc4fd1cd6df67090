"""Scenarios of the msprobe engine, each in a process of its own: its debugger is made once.

    python tests/unit/capture_msprobe_run.py SCENARIO DIRECTORY

leaves dumps below DIRECTORY and what it saw in DIRECTORY/seen.json.
"""

from __future__ import annotations

import functools
import json
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from capture_helpers import UPDATE, Tiny, hooks_of, make, tokens
from torch import Tensor, nn

from rlprobe.capture.recorder import Recorder
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.errors import RlprobeError

LOG_PROB = "actor_compute_log_prob"


def recorder(root: Path, **options: Any) -> Recorder:
    chosen = {
        "engine": "msprobe",
        "stages": (UPDATE, LOG_PROB, "actor_generate_sequences"),
        "step_end": 9,
        "provenance": False,
        "sketch": False,
        **options,
    }
    session = Session(
        "collector", "verl", str(root / "dump"), str(root / "side"), CaptureOptions(**chosen)
    )
    return Recorder(session, role="actor", rank=0, world_size=1)


def step(model: nn.Module) -> Tensor:
    output = model(tokens())
    loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens().flatten())
    loss.backward()
    model.zero_grad()
    return loss


class Breaking(Tiny):
    """Fails inside a module when told to."""

    broken = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids))
        if self.broken:
            self.layers[1](x[..., :3])
        return self.head(self.layers[1](x))


def sessions(root: Path) -> dict[str, Any]:
    """L0 statistics with verl loaded: entries, steps, other stages and a failure in between."""
    sys.modules["verl"] = types.ModuleType("verl")
    model = make(Breaking)
    capture = recorder(root, sketch=True)
    with capture.stage(UPDATE, 0, 1, model):
        step(model)
    between = {"hooks": hooks_of(model), "marks": _marks(model)}
    with capture.stage(LOG_PROB, 0, 1, model), torch.no_grad():
        model(tokens())
    with capture.stage(UPDATE, 0, 1, model):
        step(model)
    with capture.stage(UPDATE, 1, 2, model):
        step(model)
    model.broken = True
    failed = ""
    try:
        with capture.stage(UPDATE, 2, 3, model):
            step(model)
    except RuntimeError as error:
        failed = str(error)[:40]
    model.broken = False
    with capture.stage(UPDATE, 3, 4, model):
        step(model)
    tokens_capture = recorder(root, sketch=True, token_range=(1, 1))
    with tokens_capture.stage("actor_generate_sequences", 0, 1, model), torch.no_grad():
        for _ in range(3):
            model(tokens())
    after = {"hooks": hooks_of(model), "marks": _marks(model)}
    refused = ""
    try:
        with recorder(root, level="L1", stages=(LOG_PROB,)).stage(LOG_PROB, 5, 6, model):
            pass
    except RlprobeError as error:
        refused = str(error)
    return {"between": between, "after": after, "failed": failed, "refused": refused}


def tensors(root: Path) -> dict[str, Any]:
    """mix with tensors: two entries, a failure inside a forward, API records after it."""
    model = make(Breaking)
    plain = nn.functional.linear
    capture = recorder(root, level="mix", task="tensor", sketch=True)
    restored = []
    for _ in range(2):
        with capture.stage(UPDATE, 0, 1, model):
            step(model)
        restored.append(nn.functional.linear is plain)
    model.broken = True
    try:
        with capture.stage(UPDATE, 1, 2, model):
            step(model)
    except RuntimeError:
        restored.append(nn.functional.linear is plain)
    model.broken = False
    with capture.stage(UPDATE, 2, 3, model):
        step(model)
    embedding = model.get_parameter("embed.weight").detach()
    torch.save(nn.functional.embedding(tokens(), embedding), root / "expected.pt")
    return {"restored": restored}


class Overwriting(nn.Module):
    """Its input is overwritten as soon as it has returned, and its memory given back."""

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = self.First()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(0.0)
        y.untyped_storage().resize_(0)
        return x


def checksums(root: Path) -> dict[str, Any]:
    """L0 statistics with md5: checksums of tensors that are gone a moment later."""
    import os

    os.cpu_count = lambda: 1
    model = Overwriting()
    capture = recorder(root, summary_mode="md5")
    x = torch.arange(200_000, dtype=torch.float32)
    with capture.stage(LOG_PROB, 0, 1, model), torch.no_grad():
        model(x)
    return {"expected": f"{zlib.crc32((x + 1.0).numpy().tobytes()):08x}"}


def structure(root: Path) -> dict[str, Any]:
    """mix with task structure: no numbers, but every call and its parent."""
    model = make()
    with recorder(root, level="mix", task="structure").stage(UPDATE, 0, 1, model):
        step(model)
    return {}


def only(root: Path) -> dict[str, Any]:
    """mix with a choice of modules; of all; of one that does not exist; of all again."""
    model = make()
    for number, modules in enumerate([("layers.1",), ("layers.1.up",), ()]):
        with recorder(root, level="mix", modules=modules).stage(UPDATE, number, number, model):
            step(model)
    refused = ""
    try:
        with recorder(root, level="mix", modules=("layers.7",)).stage(UPDATE, 3, 4, model):
            step(model)
    except RlprobeError as error:
        refused = str(error)
    with recorder(root, level="mix").stage(UPDATE, 4, 5, model):
        step(model)
    return {"refused": refused, "hooks": hooks_of(model)}


def foreign(root: Path) -> dict[str, Any]:
    """A debugger that the user's own code made is there already."""
    root.mkdir(parents=True, exist_ok=True)
    own = root / "own.json"
    own.write_text(
        json.dumps({"task": "statistics", "dump_path": str(root / "own"), "level": "L1"})
    )
    from msprobe.pytorch import PrecisionDebugger

    PrecisionDebugger(config_path=str(own))
    try:
        with recorder(root).stage(UPDATE, 0, 1, make()):
            pass
    except RlprobeError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def _marks(model: nn.Module) -> list[str]:
    return sorted(
        {key for module in model.modules() for key in vars(module) if key.startswith("msprobe")}
    )


#: msprobe's own keys, as its users' config.json has them.
OWN: dict[str, dict[str, Any]] = {
    "extra_info": {"task": "statistics", "level": "L0", "extra_info": False},
    "scope": {
        "task": "statistics",
        "level": "L0",
        "statistics": {
            "scope": [
                "Module.0.layers.0.up.Linear.forward.0",
                "Module.0.layers.1.up.Linear.forward.0",
            ]
        },
    },
    "list": {"task": "statistics", "level": "L0", "statistics": {"list": ["layers.1"]}},
    "list of tensors": {"task": "tensor", "level": "L1", "tensor": {"list": ["sigmoid"]}},
    "tensor_list": {"task": "statistics", "level": "L0", "statistics": {"tensor_list": ["head"]}},
    "async_dump": {"task": "tensor", "level": "L1", "async_dump": True,
                   "tensor": {"list": ["embedding"]}},
    "async_dump statistics": {"task": "statistics", "level": "L0", "async_dump": True},
}  # fmt: skip


def own(root: Path, name: str) -> dict[str, Any]:
    """An update and a log-prob stage under a user's config.json, as slime's users give it."""
    from rlprobe.frameworks.slime import user_config

    file = root / "config.json"
    file.write_text(json.dumps({**OWN[name], "dump_path": str(root / "dump")}))
    session = user_config.session(file, {})
    capture = Recorder(session, role="actor", rank=0, world_size=1)
    model = make()
    with capture.stage(UPDATE, 0, 1, model):
        step(model)
    with capture.stage(LOG_PROB, 0, 1, model), torch.no_grad():
        model(tokens())
    return {}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{f"own {name}": functools.partial(own, name=name) for name in OWN},
    "sessions": sessions,
    "tensors": tensors,
    "checksums": checksums,
    "structure": structure,
    "only": only,
    "foreign": foreign,
}


def main() -> None:
    name, directory = sys.argv[1:3]
    root = Path(directory)
    torch.set_num_threads(1)
    seen = SCENARIOS[name](root)
    (root / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
