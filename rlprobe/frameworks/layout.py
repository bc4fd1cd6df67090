"""How a run spreads its model over processes, as its options declare it."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    else:
        said.append(
            "calls have no partner: without capture.coordinate_sketch (engine light) a fault is "
            "located by its stage, and by its module only where modules meet"
        )
    said.append(
        "weights, reduced gradients and changes are compared as wholes where the place of every "
        "shard is known; key data sample by sample"
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
