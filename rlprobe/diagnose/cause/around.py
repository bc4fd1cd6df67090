"""A first divergence with what surrounds it, and what of it hypotheses are fitted to."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.origin import Origin
from rlprobe.judge.row import Row
from rlprobe.judge.tokens import Profile
from rlprobe.said import Said, say


@dataclass(frozen=True)
class Scene:
    """Where the two sides part."""

    step: Step
    finding: Finding
    origin: Origin
    world_size: int = 1
    #: How the error lies along the sequence behind the origin's block; None where nothing tells.
    profile: Profile | None = None

    @property
    def is_inside(self) -> bool:
        """Whether what differs was made within a module, its inputs agreeing."""
        return self.origin.kind in (kinds.MODULE, kinds.GLUE)

    @property
    def row(self) -> Row:
        """The first record that parts."""
        return self.origin.row


def few_tokens(scene: Scene) -> list[Said]:
    """Which few tokens alone differ, in words; nothing where they differ all along."""
    few = None if scene.profile is None else scene.profile.few
    if few is None:
        return []
    where = (
        say("only token {first} differs", first=few.first)
        if few.first == few.last
        else say("only tokens {first} to {last} differ", first=few.first, last=few.last)
    )
    return [
        say(
            "{where}, in {sequences} of {of} sequences, by {size:.2g} of their own norm: all "
            "others agree",
            where=where,
            sequences=few.sequences,
            of=few.of,
            size=few.size,
        )
    ]


@dataclass
class Symptoms:
    """What differs there, and what is seen of it whatever the cause."""

    differences: list[object] = field(default_factory=list)
    seen: list[Said] = field(default_factory=list)
