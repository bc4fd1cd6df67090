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


def comparable(benchmark: Layout, target: Layout) -> list[str]:
    """What can and what cannot be compared between two layouts, a sentence a line.

    Empty where both sides are laid out alike.
    """
    if benchmark == target:
        return []
    said = [f"layouts differ: benchmark {benchmark}; target {target}"]
    if benchmark.backend != target.backend:
        said.append(
            "other back ends: modules meet by their Hugging Face names; fused projections (qkv, "
            "gate and up) and a norm inside a projection have no partner of their own"
        )
    model = [
        name
        for name in ("tensor", "pipeline", "chunks", "context", "expert", "sequence_parallel")
        if getattr(benchmark, name) != getattr(target, name)
    ]
    if model:
        said.append(
            "a rank's activations are another part of the model or of its batch than those of the "
            "other side's rank: they are compared only where both hold the same tensor"
        )
    if benchmark.data != target.data or benchmark.world_size != target.world_size:
        said.append("ranks have other samples: key data are compared sample by sample")
    said.append(
        "weights, reduced gradients and changes are compared as wholes where the place of every "
        "shard is known; the page's coverage says how much that was"
    )
    said.append(
        "a fault is then located by its stage, and by its module only where modules meet: give "
        "both sides one layout to have it named"
    )
    return said
