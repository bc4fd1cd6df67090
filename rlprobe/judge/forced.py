"""Forced generation: which forward of which sample a record is of, and where choices part.

Every engine is led through the same responses (:mod:`rlprobe.frameworks.engines.forcing`), so the
token that it would have chosen, the likeliest, is of the same context on both sides. Where a is the
benchmark's choice and b the target's, log p(a) - log p(b) is at least the benchmark's margin there,
and at most minus the target's: it moved by their sum at least. Where round-off explains as much, a
choice that parts is a near tie, and no fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlprobe import stages
from rlprobe.judge import keydata
from rlprobe.judge.analysis import Step
from rlprobe.judge.fits import Pair
from rlprobe.judge.keydata import Difference
from rlprobe.judge.row import Row

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: Of a forward: the whole sample at once, the prompt before decoding, a decoded token.
PREFILL, PROMPT, DECODE = "prefill", "prompt", "decode"
#: Forwards of a sample that has been seen whole before.
AFTER_PREFILL = (PROMPT, DECODE)
#: What an engine answers of a sample.
PHASES = (PREFILL, DECODE)
#: Two log-probs move against each other, and one token by more than the root mean square.
_MORE = 4.0


@dataclass(frozen=True)
class Forward:
    """One forward of an engine that is led through a response."""

    sample: str
    phase: str
    #: The generated token that it gives, from 0; of a prefill the first.
    token: int


def log_probs(phase: str) -> str:
    """Name of a phase's log-probs among key data."""
    return f"forced_{phase}_log_probs"


def forwards(run: Run, step: int, rank: int) -> list[Forward]:
    """A process's forwards of a step in their order; empty where nothing says so."""
    found = []
    for line in run.manifest.volatile.get("captured") or ():
        match line:
            case {
                "stage": stages.FORCED,
                "step": int(at),
                "rank": int(of),
                "forward": [str(phase), int(token)],
                "samples": [str(sample), *_],
            } if (at, of) == (step, rank):
                found.append(Forward(sample, phase, token))
    return found


def forward_of(run: Run, step: int, rank: int, row: Row) -> Forward | None:
    """The forward that a row of the stage's table is of; None where that is not known."""
    number = row.get("micro_batch")
    known = forwards(run, step, rank) if isinstance(number, int) else []
    return known[number] if isinstance(number, int) and number < len(known) else None


@dataclass(frozen=True)
class Parting:
    """Two engines would have chosen another token, after the same tokens."""

    sample: str
    #: Token of the response, from 0.
    token: int
    benchmark: int
    target: int
    #: By how much log p(benchmark's) - log p(target's) moved at the least.
    moved: float
    #: Whether round-off explains that.
    near_tie: bool


@dataclass(frozen=True)
class Choices:
    """The tokens that both engines would have chosen in one phase of a step."""

    phase: str
    #: Tokens of how many samples.
    tokens: int
    samples: int
    #: Largest difference of a recorded token's log-prob.
    largest: float
    #: Root mean square difference that round-off explains, in nats.
    noise: float
    #: Places at which a choice parts, the first of each sample first.
    partings: tuple[Parting, ...]

    @property
    def first(self) -> dict[str, Parting]:
        """Of each sample that parts, where it does first."""
        found: dict[str, Parting] = {}
        for parting in self.partings:
            found.setdefault(parting.sample, parting)
        return found


@dataclass(frozen=True)
class Repeated:
    """Responses that one engine generated from the same prompts more than once.

    Counts are of responses with the same tokens both times; None where that was not recorded.
    """

    samples: int
    #: Greedily, alone both times.
    again: int | None
    #: Greedily, alone and all at once.
    same: int
    #: With a temperature and a seed of each, alone and all at once.
    drawn: int | None
    #: Largest difference of a log-prob of ``same`` up to where tokens part; None where none are
    #: known.
    largest: float | None


def repeated(run: Run, step: int) -> Repeated | None:
    """Whether a run's engine repeats itself, and in another batch; None where it was not asked.

    Raises:
        DumpError: a key data file is damaged.
    """
    alone, together = (_free(run, turn, "tokens", step) for turn in ("alone", "together"))
    shared = [sample for sample in alone if sample in together]
    if not shared:
        return None
    known = _moved(
        (alone, together),
        [_free(run, turn, "log_probs", step) for turn in ("alone", "together")],
        shared,
    )
    drawn = [_free(run, f"drawn_{turn}", "tokens", step) for turn in ("alone", "together")]
    return Repeated(
        len(shared),
        _alike(alone, _free(run, "again", "tokens", step)),
        _alike(alone, together) or 0,
        _alike(*drawn),
        float(known.max()) if known.size else None,
    )


_Free = dict[str, npt.NDArray[Any]]


def _free(run: Run, turn: str, what: str, step: int) -> _Free:
    """What an engine generated by itself, by sample."""
    rows = keydata.load(run, f"free_{turn}_{what}", step)
    return {row.sample: row.values for row in rows if row.sample is not None}


def _alike(one: _Free, other: _Free) -> int | None:
    """How many responses are the same; None where none are of the same samples."""
    shared = [sample for sample in one if sample in other]
    return sum(np.array_equal(one[s], other[s]) for s in shared) if shared else None


def _moved(
    tokens: Sequence[_Free], log_probs: Sequence[_Free], shared: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Differences of log-probs up to where tokens part."""
    apart = []
    for sample in shared:
        one, other = (side[sample] for side in tokens)
        length = min(len(one), len(other))
        differ = np.flatnonzero(one[:length] != other[:length])
        until = int(differ[0]) if len(differ) else length
        rows = [side.get(sample, np.empty(0))[:until] for side in log_probs]
        if until and len(rows[0]) == len(rows[1]) == until:
            apart.append(np.abs(rows[0].astype(np.float64) - rows[1].astype(np.float64)))
    known = np.concatenate(apart) if apart else np.empty(0)
    return np.asarray(known[np.isfinite(known)])


def of_step(step: Step) -> list[Choices]:
    """What both engines would have chosen in each phase of a judged step."""
    finding = step.findings.get(stages.FORCED)
    floors = {} if finding is None else {o.name: o.floor for o in finding.outcomes}
    found = [choices(step.key_data, phase, floors.get(log_probs(phase), 0.0)) for phase in PHASES]
    return [one for one in found if one is not None]


def choices(key_data: Mapping[str, Difference], phase: str, floor: float) -> Choices | None:
    """What both engines would have chosen; None where it is not among both sides' key data.

    Args:
        key_data: differences of a step by name.
        phase: of :data:`PHASES`.
        floor: relative L2 difference of the phase's log-probs that round-off explains.
    """
    wanted = [f"forced_{phase}_{what}" for what in ("log_probs", "choices", "margins")]
    if any(name not in key_data for name in wanted):
        return None
    pairs = [{s: (b, t) for s, b, t in key_data[name].pairs} for name in wanted]
    shared = [s for s, _, _ in key_data[wanted[1]].pairs if all(s in known for known in pairs)]
    if not shared:
        return None
    own, other = (np.concatenate([pairs[0][s][side] for s in shared]) for side in (0, 1))
    finite = np.isfinite(own) & np.isfinite(other)
    largest = float(np.abs(other - own)[finite].max(initial=0.0))
    noise = floor * float(np.sqrt(np.mean(own[finite] ** 2))) if finite.any() else 0.0
    found = [
        parting
        for sample in shared
        for parting in _partings(sample, pairs[1][sample], pairs[2][sample], noise)
    ]
    return Choices(phase, len(own), len(shared), largest, noise, tuple(found))


def _partings(
    sample: str,
    chosen: Pair,
    margins: Pair,
    noise: float,
) -> Iterator[Parting]:
    for token in np.flatnonzero(chosen[0] != chosen[1]):
        moved = float(margins[0][token] + margins[1][token])
        yield Parting(
            sample, int(token), int(chosen[0][token]), int(chosen[1][token]), moved,
            moved <= _MORE * noise,
        )  # fmt: skip
