"""Who attends to whom: which tokens' outputs depend on which tokens' inputs, on either side.

What was seen when one token after another was changed (:mod:`rlprobe.capture.trace.reach`).
Tokens that attend to others on one side alone are another mask where that accounts for the
difference: tokens that depend on the same ones make the same, and those that do not differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlprobe.said import Said, exactly, say

Array = npt.NDArray[np.float64]

#: Share of the largest change from which on a token is said to depend; none is exactly 0.
_CLEAR = 1e-3
#: Floors by which one token's output may differ that agrees: a floor is of all tokens together.
_OF_A_TOKEN = 8.0
#: Of rounding, where no floor is known.
_LEAST = 1e-5
#: Share of tokens that may agree though they depend on others, by a small weight, and of those that
#: may differ beside them where not every token was changed.
_FEW = 0.05
#: Tokens that are named.
_NAMED = 6


@dataclass(frozen=True)
class Reached:
    """What the two sides' tokens depend on."""

    #: Whether who attends to whom accounts for the difference.
    accounts: bool
    said: Said


def judge(
    benchmark: Array, target: Array, outputs: tuple[Array, Array], floor: float
) -> Reached | None:
    """What differs in who depends on whom; None where nothing does, or nothing can be told.

    Args:
        benchmark, target: changed tokens and the changes of all tokens, as captured.
        outputs: what the two sides made, [..., channels].
        floor: relative difference of outputs that agree.
    """
    if benchmark.shape != target.shape or not np.array_equal(benchmark[:, 0], target[:, 0]):
        return None
    changed, (b, t) = benchmark[:, 0].astype(int), (benchmark[:, 1:], target[:, 1:])
    own, other = (o.reshape(-1, o.shape[-1]) for o in outputs)
    if not (np.isfinite(b).all() and np.isfinite(t).all()) or own.shape != other.shape:
        return None
    if len(own) != b.shape[1]:
        return None
    clear = _CLEAR * min(b.max(), t.max())
    lost, gained = (b > clear) & (t == 0), (t > clear) & (b == 0)
    if not (lost | gained).any():
        return None
    aside = np.ones_like(b, dtype=bool)
    aside[np.arange(len(changed)), changed] = False
    mixes = bool(((b > clear) & aside).any())
    of_others = ((lost | gained) & aside).any(axis=0)
    if not of_others.any():
        return None
    errors = np.linalg.norm(other - own, axis=1) / np.maximum(np.linalg.norm(own, axis=1), 1e-30)
    differ = errors > max(_OF_A_TOKEN * floor, _LEAST)
    # whether a token attends to itself is not seen, since its query is its own: one that others no
    # longer attend to may not either
    unseen = np.zeros_like(of_others)
    unseen[changed[(lost & aside).any(axis=1)]] = True
    beside = differ & ~of_others & ~unseen
    accounts = (
        mixes
        and bool((~differ).any())
        and bool(differ[of_others].mean() >= 1 - _FEW)
        and bool(beside.mean() <= (0.0 if len(changed) == b.shape[1] else _FEW))
    )
    said = [
        _of(changed, (which & aside), words)
        for which, words in ((gained, _GAINED), (lost, _LOST))
        if (which & aside).any()
    ]
    text = said[0] if len(said) == 1 else said[0] + say("; and ") + said[1]
    if accounts:
        text += say(
            "; of the {count} tokens whose outputs do, {differ} differ, and of the other {rest} "
            "{agree} agree",
            count=int(of_others.sum()),
            differ=int(differ[of_others].sum()),
            rest=int((~of_others).sum()),
            agree=int((~differ & ~of_others).sum()),
        )
    return Reached(accounts, text)


_GAINED, _LOST = "gained", "lost"


def _of(changed: npt.NDArray[np.int_], pairs: npt.NDArray[np.bool_], words: str) -> Said:
    outputs = _listed(np.flatnonzero(pairs.any(axis=0)))
    inputs = _listed(changed[pairs.any(axis=1)])
    if words == _GAINED:
        return say(
            "outputs of tokens {outputs} depend on inputs of tokens {inputs} on the target alone",
            outputs=outputs,
            inputs=inputs,
        )
    return say(
        "outputs of tokens {outputs} depend on inputs of tokens {inputs} on the benchmark alone",
        outputs=outputs,
        inputs=inputs,
    )


def _listed(places: npt.NDArray[np.int_]) -> Said:
    found = [int(place) for place in places]
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return say("{first} to {last}", first=found[0], last=found[-1])
    shown = ", ".join(map(str, found[:_NAMED]))
    return exactly(f"{shown}, …" if len(found) > _NAMED else shown)
