"""Dumps of processes, and which of them are compared with which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlprobe.compare import planner, sides
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor


def put(root: Path, place: str, top: float) -> None:
    """A process that was given a batch of its own: token ids, and a first layer's input."""
    values = (top, -top, 0.1 * top, 2 * top)
    ids = tensor((int(100 * top), 0, None, None), dtype="torch.int64")
    dumps.write(
        root / place,
        {
            "Module.embed.Embedding.forward.0": call([ids], [tensor(values)]),
            "Module.layers.0.Linear.forward.0": call([tensor(values)], [tensor(values)]),
        },
    )


def paired(tmp_path: Path, **options: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """Directories compared with each other, and what is said of it."""
    benchmark, target = (sides.resolve(str(tmp_path / name)) for name in ("b", "t"))
    (stage,) = planner.plan(benchmark, target, **options)
    found = []
    for pairing in stage.pairings:
        places = []
        for name, side, process in (
            ("b", stage.benchmark, pairing.benchmark),
            ("t", stage.target, pairing.target),
        ):
            paths = getattr(side, "paths", {})
            places.append(
                "" if process is None else str(paths[process].relative_to(tmp_path / name))
            )
        found.append((places[0], places[1]))
    return found, list(stage.notes)
