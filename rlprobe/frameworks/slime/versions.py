"""Which slime this is, and what is known of it. Imports nothing of slime.

slime is installed from a checkout, and the package of that name on the public index is another
project: the version is read from the checkout's ``setup.py`` where there is one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rlprobe.capture import code
from rlprobe.errors import HookError
from rlprobe.said import Said, say

#: Tags whose hook points were read and are contract-tested; ``main`` stands for the newest.
KNOWN: tuple[str, ...] = ("0.2.2", "0.2.3", "0.2.4", "0.3.0", "0.3.1", "main")
OLDEST = (0, 2, 2)

#: Names the checkout of slime that holds ``train.py``.
CHECKOUT = "RLPROBE_SLIME"
#: Of a checkout that says none.
UNSAID = "(of unknown version)"


@dataclass(frozen=True)
class Traits:
    """What differs between the versions as far as rlprobe cares."""

    #: ``old_log_prob`` is left out where the training forward gives the same numbers.
    reuses_log_probs: bool
    #: On-policy distillation with a Megatron teacher exists.
    has_teacher: bool


def parse(version: str) -> tuple[int, ...] | None:
    """``v0.2.2`` and ``0.2.2.post1`` as (0, 2, 2); None for ``main``, ``HEAD`` and the like."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def traits(version: str) -> Traits:
    """What is known of a version; one without a number is taken for the newest."""
    number = parse(version)
    newest = (10**6,)
    return Traits(
        reuses_log_probs=(number or newest) >= (0, 3, 0),
        has_teacher=(number or newest) >= (0, 2, 3),
    )


#: (versions it was seen in, as (at least, less than); what differs from the newest).
_DIFFERENCES = (
    (
        ((0, 2, 2), (0, 2, 3)),
        say(
            "slime v0.2.2 rounds the gradient of its fused cross entropy to bf16 also in an fp32 "
            "run (seen beside main, where it is not; the versions between were not looked at), so "
            "gradients of the update part at the head on any device"
        ),
    ),
)


def known_differences(one: str, other: str) -> list[Said]:
    """What two versions compute otherwise by themselves, of what is known: sentences."""
    newest = (10**6,)
    numbers = [parse(version) or newest for version in (one, other)]
    return [
        said
        for (first, beyond), said in _DIFFERENCES
        if len({first <= number < beyond for number in numbers}) == 2
    ]


def gathers_train_data(version: str) -> bool:
    """Whether ``--save-debug-train-data`` writes all shards at once: after v0.3.1, in main."""
    number = parse(version)
    return number is None or number > (0, 3, 1)


def is_known(version: str) -> bool:
    """Whether the version's hook points were read."""
    number = parse(version)
    return number is None or any(parse(known) == number for known in KNOWN)


def checkout() -> Path | None:
    """The directory that holds the importable ``slime`` package, or None."""
    spec = find_spec("slime")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).parent if places else None


def same(declared: str, found: str) -> bool:
    """Whether a checkout may be of a declared version: only two numbers can contradict each other.

    ``main`` carries the number of the release before it, and so does whatever follows a tag.
    """
    numbers = parse(declared), parse(found)
    return None in numbers or numbers[0] == numbers[1]


def require(declared: str | None, root: Path) -> None:
    """The checkout that is about to train is of the version that the run's key was made with.

    Args:
        declared: ``framework_version``; None accepts any.
        root: the checkout.

    Raises:
        HookError: it is of another version.
    """
    found = code.version_of(root)
    if declared is None:
        return
    if found is None:
        if parse(declared) is not None:
            sys.stderr.write(
                f"rlprobe: {root} says no version (setup.py), so framework_version {declared} is "
                "not checked\n"
            )
        return
    if not same(declared, found):
        raise HookError(
            f"framework_version says slime {declared}, but {root} is {found}: correct "
            f"framework_version, or give this side a checkout of {declared} ({CHECKOUT} in its "
            "environment)"
        )


def installed() -> str:
    """The version of the importable slime, for messages."""
    root = checkout()
    if root is None:
        return "(not installed)"
    found = code.version_of(root)
    if found is not None:
        return found
    try:
        return metadata.version("slime")
    except metadata.PackageNotFoundError:
        return UNSAID
