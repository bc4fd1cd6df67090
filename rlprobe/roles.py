"""The roles of an alignment's runs, and which of them are compared."""

from __future__ import annotations

import re

BENCHMARK = "benchmark"
TARGET = "target"
#: The benchmark device replays its own rollouts: is it equal to itself?
REPEAT = "repeat"
#: The target once more: is it equal to itself?
REPEAT_TARGET = "repeat_target"
#: The benchmark replays in fp32, or in fp64 when it is fp32 already.
HIGH_PRECISION = "high_precision"

#: Beginning of the roles of further benchmark replays whose weights are disturbed in the last bit.
_PERTURBED = "perturbed"

#: Every other role of a run, in the order in which runs depend on one another.
ROLES: tuple[str, ...] = (BENCHMARK, TARGET, REPEAT, REPEAT_TARGET, HIGH_PRECISION)

#: Each comparison's name and its two sides, the one compared against first.
PAIRS: dict[str, tuple[str, str]] = {
    TARGET: (BENCHMARK, TARGET),
    REPEAT: (BENCHMARK, REPEAT),
    REPEAT_TARGET: (TARGET, REPEAT_TARGET),
    HIGH_PRECISION: (BENCHMARK, HIGH_PRECISION),
}


def perturbed(number: int) -> str:
    """The role of a perturbed control, counted from 1."""
    return f"{_PERTURBED}{number}"


def is_perturbed(role: str) -> bool:
    """Whether a role is that of a perturbed control."""
    return re.fullmatch(rf"{_PERTURBED}[1-9]\d*", role) is not None


def is_role(name: str) -> bool:
    """Whether a run may have this role."""
    return name in ROLES or is_perturbed(name)
