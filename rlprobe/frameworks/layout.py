"""How a run spreads its model over processes, as its options declare it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlprobe.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Back end and sizes of the parallel groups of a run's actor."""

    #: ``fsdp``, ``fsdp2``, ``megatron``, …
    backend: str
    world_size: int
    tensor: int = 1
    pipeline: int = 1
    #: Virtual pipeline stages on each pipeline rank.
    chunks: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    #: Whether pipeline ranks and chunks must have as many layers each; False where not known.
    even: bool = field(default=False, compare=False)

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    def require(self, role: str) -> None:
        """Refuse a world that these groups do not divide.

        Args:
            role: of the run, for the message.

        Raises:
            ConfigError: the framework would stop at it once the job has its devices.
        """
        groups = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        size = math.prod(groups.values())
        if size < 1 or self.world_size % size:
            said = " x ".join(f"{name} {ranks}" for name, ranks in groups.items() if ranks != 1)
            raise ConfigError(
                f"{role}: world_size is {self.world_size}, which {said} parallel ranks do not "
                f"divide; accepted: a multiple of {size}"
            )
        if self.expert > 1 and self.world_size // self.pipeline % self.expert:
            raise ConfigError(
                f"{role}: expert parallel size {self.expert} does not divide the "
                f"{self.world_size // self.pipeline} ranks of a pipeline stage"
            )

    def require_model(self, role: str, model: Mapping[str, Any]) -> None:
        """Refuse a model that these groups do not divide.

        Args:
            role: of the run, for the message.
            model: its ``config.json``; what it does not say is not held against it.

        Raises:
            ConfigError: names everything that the framework would stop at once it builds the model.
        """

        def count(*names: str) -> int:
            return next((n for name in names if isinstance(n := model.get(name), int)), 0)

        heads, groups = count("num_attention_heads"), count("num_key_value_heads")
        layers, parts = count("num_hidden_layers"), self.pipeline * self.chunks
        experts = count("num_experts", "num_local_experts", "n_routed_experts")
        wrong = []
        if heads % self.tensor:
            wrong.append(f"tensor parallel size {self.tensor} does not divide {heads} heads")
        elif groups and groups % self.tensor and self.tensor % groups:
            wrong.append(
                f"tensor parallel size {self.tensor} is neither a divisor nor a multiple of "
                f"{groups} key/value heads"
            )
        if self.even and layers % parts:
            chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
            wrong.append(f"pipeline {self.pipeline}{chunks} does not divide {layers} layers")
        if experts % self.expert:
            wrong.append(f"expert parallel size {self.expert} does not divide {experts} experts")
        if wrong:
            raise ConfigError(f"{role}: of the model, {'; '.join(wrong)}")

    def __str__(self) -> str:
        sizes = {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual pipeline": self.chunks,
            "context": self.context,
            "expert": self.expert,
        }
        shown = [f"{name} {size}" for name, size in sizes.items() if size != 1]
        if self.sequence_parallel and self.tensor > 1:
            shown.append("sequences split")
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.backend}, {ranks}" + (f" ({', '.join(shown)})" if shown else "")


def comparable(benchmark: Layout, target: Layout, coordinates: bool) -> list[str]:
    """What can and what cannot be compared between two layouts, a sentence a line.

    Empty where both sides are laid out alike.

    Args:
        benchmark, target: how each side spreads its model.
        coordinates: whether both capture records by sample, position and feature.
    """
    if benchmark == target:
        return []
    said = [f"layouts differ: benchmark {benchmark}; target {target}"]
    if coordinates:
        said.append(
            "what modules take and give, and their gradients, is compared over whole stages, by "
            "sample, position and feature, under Hugging Face names; docs/layouts.md lists what "
            "is not"
        )
        said += _without_coordinates(benchmark, target)
        said += _of_updates(benchmark, target)
    else:
        said.append(
            "calls have no partner: without capture.coordinate_sketch (engine light) no agreement "
            "is claimed; a fault is located by its stage, and by its module only where modules meet"
        )
    said.append(
        "weights, reduced gradients and changes are compared as wholes where the place of every "
        "shard is known; key data sample by sample"
    )
    said.append(
        "not compared: single calls, losses of single micro-batches, and operators: the page "
        "names stage and module, and a cause as far as records tell it (refine needs sides laid "
        "out alike)"
    )
    return said


def _of_updates(benchmark: Layout, target: Layout) -> list[str]:
    """What of an update the two layouts have not in common."""
    said = []
    if benchmark.data != target.data:
        said.append(
            f"{benchmark.data} against {target.data} data-parallel ranks: where a stage has "
            "several updates, the first ones hold other samples: nothing of it is compared, and "
            "unless `coverage` asks for less no agreement is claimed"
        )
    backends = {benchmark.backend, target.backend}
    if "megatron" in backends and len(backends) > 1:
        said.append(
            "Megatron against FSDP: with a critic (a bias that one side has not) or weight decay "
            "(Megatron decays no norms) these two do not compute the same"
        )
    return said


def _without_coordinates(benchmark: Layout, target: Layout) -> list[str]:
    """What has no coordinates in one of two layouts."""
    said = []
    for name, layout in (("benchmark", benchmark), ("target", target)):
        if layout.context > 1:
            said.append(
                f"the {name}'s context parallelism: packed rows alone have coordinates, of others "
                "activations are not compared"
            )
        if layout.expert > 1:
            said.append(
                f"the {name}'s expert parallelism: a layer's experts are compared together, single "
                "ones where both sides have a module for each"
            )
    return said
