"""What an alignment's runs will take on disk, guessed upwards from its configuration.

Records are counted per decoder layer, micro-batch and stage, and weighed by what the default run
really writes (tests/contract/test_disk.py measures it); tensors by tokens and widths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlprobe import stages
from rlprobe.config import BUILTIN, Alignment
from rlprobe.doctor import states
from rlprobe.roles import BENCHMARK
from rlprobe.runs import identity
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec

#: Bytes of a record of a whole stage: eight sketches of 61 numbers in fp64.
_COORDINATE_BYTES = 8 * 61 * 8
#: Bytes of a record in JSON and Parquet together, without and with a sketch.
_RECORD_BYTES, _SKETCH_BYTES = 700, 700
#: Modules of a decoder layer, and of the rest of a model in units of layers.
_MODULES_PER_LAYER, _REST = 18, 0.5
#: Records of a module's call: inputs, outputs and parameters; of a training stage also gradients.
_FORWARD_RECORDS, _TRAINING_RECORDS = 5, 9
#: APIs that a layer calls (level L1 and mix), each with about four records.
_CALLS_PER_LAYER = 60
#: Parameters of a layer; weights are described once, and an update has four records of each.
_PARAMETERS_PER_LAYER, _PARAMETER_RECORDS = 12, 4
#: Bytes of key data and rollouts a token.
_KEY_DATA_BYTES = 120
#: Tensors of a layer that task tensor writes, in units of tokens x hidden size in fp32, forward.
_TENSORS_PER_LAYER = 40
_FILES_PER_RANK_AND_STAGE = 8
_KEY_DATA_FILES = 26
#: What frameworks do where nothing is said.
_ROWS, _PROMPT, _RESPONSE, _MICRO_BATCHES = 1024, 1024, 1024, 16


@dataclass(frozen=True)
class Size:
    """A run's or an alignment's guess."""

    bytes: int
    files: int

    def __add__(self, other: Size) -> Size:
        return Size(self.bytes + other.bytes, self.files + other.files)


@dataclass(frozen=True)
class Batch:
    """What a step works on, over all ranks."""

    rows: int
    tokens: int
    #: Of one rank and stage.
    micro_batches: int


def of_alignment(alignment: Alignment) -> Size | None:
    """The guess over all runs of an alignment; None where the model's config.json is not there."""
    found = of_roles(alignment)
    return None if found is None else sum(found.values(), Size(0, 0))


def of_roles(alignment: Alignment) -> dict[str, Size] | None:
    """The guess of each run; None where the model's config.json is not there.

    Raises:
        ConfigError: that file is none, or the framework would refuse a run.
    """
    shape = _shape(alignment)
    if shape is None:
        return None
    # a perturbed control leaves the trainer's metrics, a line a step
    found = {
        role: _of_run(alignment, shape, spec)
        for role, spec in plan(alignment, located=False).items()
        if not spec.perturbed
    }
    found[BENCHMARK] += Size(*states.size(alignment, shape))
    return found


def of_states(alignment: Alignment) -> Size | None:
    """The part of it that ``controls.rejoin`` costs the benchmark; None as :func:`of_roles`."""
    shape = _shape(alignment)
    return None if shape is None else Size(*states.size(alignment, shape))


def _shape(alignment: Alignment) -> Mapping[str, Any] | None:
    if alignment.model.path.startswith(BUILTIN):
        return {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "vocab_size": 264,
        }
    return identity.model_config(alignment.model.path) or None


def batch_of(alignment: Alignment, world_size: int) -> Batch:
    """Rows, tokens and micro-batches by the framework's own settings, else by its defaults."""
    settings = _settings(alignment)
    rows = int(settings.get("rows", _ROWS))
    length = int(settings.get("prompt", _PROMPT)) + int(settings.get("response", _RESPONSE))
    micro = settings.get("micro")
    each = math.ceil(rows / world_size / int(micro)) if micro else _MICRO_BATCHES
    return Batch(rows, rows * length, max(1, each))


def _settings(alignment: Alignment) -> dict[str, Any]:
    if alignment.framework != "verl":
        return {}
    from rlprobe.frameworks.verl.host import plan

    config = plan.from_overrides(list(alignment.overrides))
    data, actor = config.get("data", {}), config.get("actor_rollout_ref", {})
    train, rollout = actor.get("actor", {}), actor.get("rollout", {})
    found = {
        "prompt": data.get("max_prompt_length"),
        "response": data.get("max_response_length"),
        "micro": train.get("ppo_micro_batch_size_per_gpu"),
    }
    if data.get("train_batch_size"):
        found["rows"] = int(data["train_batch_size"]) * int(rollout.get("n", 1))
    return {key: value for key, value in found.items() if value is not None}


def _of_run(alignment: Alignment, shape: Mapping[str, Any], spec: RunSpec) -> Size:
    capture, world_size = spec.capture, spec.world_size
    layers = int(shape.get("num_hidden_layers", 32)) + _REST
    hidden = int(shape.get("hidden_size", 4096))
    batch = batch_of(alignment, world_size)
    steps = alignment.steps.end - alignment.steps.start + 1
    ranks = len(capture.ranks) or world_size
    record = _RECORD_BYTES + (_SKETCH_BYTES if capture.sketch else 0)
    total = files = 0
    for stage in spec.stages:
        calls = batch.micro_batches
        if stage == stages.FORCED:
            samples = min(capture.forced_samples or batch.rows, batch.rows)
            calls = math.ceil(samples * (1 + capture.forced_tokens) / ranks)
        if stage == stages.GENERATE:
            if capture.token_range is None:
                continue
            first, last = capture.token_range
            calls = math.ceil(batch.rows / ranks) * (last - first + 1)
        records = layers * calls * _records(capture.level, stage in stages.UPDATE_STAGES)
        if stage in stages.UPDATE_STAGES:
            records += layers * _PARAMETERS_PER_LAYER * _PARAMETER_RECORDS
        total += int(records * record * ranks)
        if capture.task == "tensor":
            factor = 3 if stage in stages.UPDATE_STAGES else 1
            total += int(layers * _TENSORS_PER_LAYER * batch.tokens * hidden * 4 * factor)
            files += int(records * ranks)
        if capture.coordinate_sketch and stage in stages.TRAINING_STAGES:
            ends = 4 if stage in stages.UPDATE_STAGES else 2
            total += int(layers * _MODULES_PER_LAYER * ends * _COORDINATE_BYTES * ranks)
        files += _FILES_PER_RANK_AND_STAGE * ranks
    # digests, norms and sketches of weights, at the first step
    total += int(layers * _PARAMETERS_PER_LAYER * record * ranks * len(spec.stages) / steps)
    if capture.key_data:
        total += batch.tokens * _KEY_DATA_BYTES
        files += _KEY_DATA_FILES * batch.micro_batches * ranks
    return Size(bytes=total * steps, files=files * steps)


def _records(level: str, trains: bool) -> float:
    """Records of a layer's call."""
    found = 0.0
    if level != "L1":
        found += _MODULES_PER_LAYER * (_TRAINING_RECORDS if trains else _FORWARD_RECORDS)
    if level != "L0":
        found += _CALLS_PER_LAYER * (8 if trains else 4)
    return found
