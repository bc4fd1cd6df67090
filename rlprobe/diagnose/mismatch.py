"""Training log-probs against the engine's, on each side: is a gap the device's or the method's?

With d = log p_train - log p_rollout per response token, sampled from the rollout engine, KL from
rollout to training is estimated by k1 = mean(-d) and, with less variance and never below 0, by
k3 = mean(exp(d) - d - 1) (J. Schulman, Approximating KL divergence, 2020).

Only tokens that count are compared: those with mask 1 of the update (a tool's answer stands inside
the response with mask 0 and a log-prob of 0.0). Tokens without a finite log-prob are left out and
counted on either hand; half a run of NaN is no small gap.

A replay trains on the benchmark's rollouts, so the target's gap is its own training against the
benchmark's engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlprobe.compare.samples.pairing import Key, joined, keyed
from rlprobe.judge import keydata
from rlprobe.store.read import Run

#: Published bars for mean |d|: of any device, and what is reached on GPUs and NPUs.
BARS: dict[str, float] = {"general": 0.01, "gpu": 0.025, "npu": 0.05}
TRAINED, GENERATED = "old_log_probs", "rollout_log_probs"
#: Masks over the response, by framework: verl's actor update, slime's.
MASKS = ("given_actor_mask", "loss_mask", "response_mask")


@dataclass(frozen=True)
class Mismatch:
    """One run's gap between training and rollout."""

    tokens: int
    samples: int
    mean_abs: float
    max_abs: float
    k1: float
    k3: float
    #: Tokens of responses that do not count (mask 0).
    masked: int
    #: Tokens that count and have no finite log-prob of the training, and of the engine.
    trained_nonfinite: int
    generated_nonfinite: int
    #: Mean |d| by position in the response, shape [longest response].
    by_position: npt.NDArray[np.float64]


def measure(run: Run, step: int) -> Mismatch | None:
    """The gap of a run at a step; None where either log-prob is not among its key data.

    Where no token has both, ``tokens`` is 0 and the numbers are NaN.

    Raises:
        DumpError: a key data file is damaged.
    """
    trained, generated = (keydata.load(run, name, step) for name in (TRAINED, GENERATED))
    masks = _masks(run, step)
    differences = []
    masked = 0
    without = np.zeros(2, dtype=np.int64)
    for key, row, engine in joined(trained, generated):
        other = engine.values
        if other.ndim != 1 or row.values.ndim != 1:
            continue
        own = _response(row.values, len(other))
        if own is None:
            continue
        counts = masks.get(key, np.ones(len(other), dtype=bool))
        if len(counts) != len(other):
            counts = np.ones(len(other), dtype=bool)
        masked += int(np.count_nonzero(~counts))
        pair = [np.where(counts, values.astype(np.float64), 0.0) for values in (own, other)]
        without += [int(np.count_nonzero(~np.isfinite(values))) for values in pair]
        with np.errstate(invalid="ignore"):  # infinity less infinity
            differences.append(np.where(counts, pair[0] - pair[1], np.nan))
    if not differences:
        return None
    gaps = np.concatenate([d[np.isfinite(d)] for d in differences])
    if not gaps.size:
        nan = float("nan")
        return Mismatch(
            0, len(differences), nan, nan, nan, nan, masked, int(without[0]), int(without[1]),
            np.empty(0),
        )  # fmt: skip
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.exp(gaps) - gaps - 1.0))
    table = np.full((len(differences), max(d.size for d in differences)), np.nan)
    for index, difference in enumerate(differences):
        finite = np.isfinite(difference)
        table[index, : difference.size][finite] = np.abs(difference[finite])
    # a position at which no sample has a number says nothing
    table = table[:, np.isfinite(table).any(axis=0)]
    return Mismatch(
        tokens=gaps.size,
        samples=len(differences),
        mean_abs=float(np.abs(gaps).mean()),
        max_abs=float(np.abs(gaps).max()),
        k1=float(-gaps.mean()),
        k3=k3,
        masked=masked,
        trained_nonfinite=int(without[0]),
        generated_nonfinite=int(without[1]),
        by_position=np.nanmean(table, axis=0),
    )


def _masks(run: Run, step: int) -> dict[Key, npt.NDArray[np.bool_]]:
    """By sample and occurrence, which tokens of its response count; empty without a mask."""
    for name in MASKS:
        rows = keyed(keydata.load(run, name, step))
        found = {key: row.values.astype(bool) for key, row in rows.items() if row.values.ndim == 1}
        if found:
            return found
    return {}


def _response(values: keydata.Array, length: int) -> keydata.Array | None:
    """The response's part of a row over the whole sequence.

    A row as long as the response is that already. A longer one holds at position i the log-prob of
    token i + 1, and something of no meaning at the last.
    """
    if len(values) == length:
        return values
    if len(values) > length:
        return values[len(values) - length - 1 : len(values) - 1]
    return None
