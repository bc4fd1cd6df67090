"""Leading an engine through a recorded response: what is asked, and what it answers.

A sample is asked for twice, alone. *Prefill*: prompt and response in one forward, which gives every
token's log-prob without a cache. *Decode*: the prompt, then the first tokens of the response one by
one, each the recorded token whatever the engine would have drawn, so that both sides compute the
same to the end. The two differ in what a KV cache, a decode kernel or a sampler does wrong.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Forwards of a sample: the whole of it, the prompt before decoding, and a decoded token.
PREFILL, PROMPT, DECODE = "prefill", "prompt", "decode"
#: Where a request of verl's or an engine's carries what is asked.
KEY = "rlprobe_forced"
#: Of a request that generates to see whether the engine repeats itself: part of no sample.
FREE = "rlprobe_free"


@dataclass(frozen=True)
class Asked:
    """One sample that an engine is to be led through."""

    #: Its number among those of the step, from 0.
    number: int
    #: Its digest.
    sample: str
    response: list[int]
    #: Tokens that are decoded one by one.
    tokens: int

    @classmethod
    def of(cls, sampling: dict[str, Any]) -> Asked | None:
        """What sampling parameters ask; None where they are of generation."""
        found = sampling.get(KEY)
        return None if found is None else cls(**found)

    def as_dict(self) -> dict[str, Any]:
        """As a request carries it."""
        return asdict(self)


@dataclass(frozen=True)
class Scores:
    """What an engine gives each recorded token, in order; all of one length."""

    log_probs: list[float]
    #: The likeliest token at its place.
    choices: list[int]
    #: By how much that one's log-prob is above the second's: 0 is a tie.
    margins: list[float]


@dataclass(frozen=True)
class Answer:
    """An engine's scores of one sample."""

    prefill: Scores
    decode: Scores

    def as_dict(self) -> dict[str, Any]:
        """As a reply carries it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Answer:
        """The inverse of :meth:`as_dict`."""
        return cls(Scores(**raw["prefill"]), Scores(**raw["decode"]))
