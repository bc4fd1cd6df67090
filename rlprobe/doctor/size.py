"""A generous guess of what an alignment's runs will take on disk, from the model's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlprobe.config import BUILTIN, Alignment

#: Bytes of one record in JSON and Parquet together, a sketch included.
_RECORD_BYTES = 1600
#: Modules of a decoder layer that produce records, and records of each with their gradients.
_MODULES_PER_LAYER = 18
_RECORDS_PER_MODULE = 10
#: Tensors of a layer that task: tensor writes, in units of tokens x hidden size.
_TENSORS_PER_LAYER = 40
_TOKENS_PER_RANK = 16_384
_FILES_PER_RANK_AND_STAGE = 8


@dataclass(frozen=True)
class Size:
    bytes: int
    files: int


def of_alignment(alignment: Alignment) -> Size | None:
    """Upper guess over all runs of an alignment; None for a builtin model, which is tiny.

    Task ``tensor`` is taken with 16384 tokens per rank and stage, in fp32.
    """
    if alignment.model.path.startswith(BUILTIN):
        return None
    file = Path(alignment.model.path).expanduser() / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    layers = int(config.get("num_hidden_layers", 32))
    hidden = int(config.get("hidden_size", 4096))
    capture = alignment.capture
    stages = 6 if capture.stages == "all" else len(capture.stages)
    steps = alignment.steps.end - alignment.steps.start + 1
    sides = 2 + sum(
        bool(wanted)
        for wanted in (
            alignment.controls.repeat,
            alignment.controls.repeat_target,
            alignment.controls.high_precision,
        )
    )
    world = max(alignment.benchmark.world_size, alignment.target.world_size)
    ranks = len(capture.ranks) or world
    per_stage = layers * _MODULES_PER_LAYER * _RECORDS_PER_MODULE * _RECORD_BYTES
    if capture.task == "tensor":
        per_stage += layers * _TENSORS_PER_LAYER * _TOKENS_PER_RANK * hidden * 4
    units = stages * steps * ranks * sides
    return Size(bytes=per_stage * units, files=_FILES_PER_RANK_AND_STAGE * units)
