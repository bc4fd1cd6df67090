"""Training log-probs against the engine's, on each side: is a gap the device's or the method's?

With d = log p_train - log p_rollout per response token, sampled from the rollout engine, KL from
rollout to training is estimated by k1 = mean(-d) and, with less variance and never below 0, by
k3 = mean(exp(d) - d - 1) (J. Schulman, Approximating KL divergence, 2020).

A replay trains on the benchmark's rollouts, so the target's gap is its own training against the
benchmark's engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlprobe.judge import keydata
from rlprobe.store.read import Run

#: Published bars for mean |d|, and what they are taken to mean.
BARS: tuple[tuple[float, str], ...] = (
    (0.01, "needs work above 0.01 (general)"),
    (0.025, "GPU below 0.025"),
    (0.05, "NPU below 0.05"),
)
TRAINED, GENERATED = "old_log_probs", "rollout_log_probs"


@dataclass(frozen=True)
class Mismatch:
    """One run's gap between training and rollout."""

    tokens: int
    samples: int
    mean_abs: float
    max_abs: float
    k1: float
    k3: float
    #: Mean |d| by position in the response, shape [longest response].
    by_position: npt.NDArray[np.float64]


def measure(run: Run, step: int) -> Mismatch | None:
    """The gap of a run at a step; None where either log-prob is not among its key data.

    Raises:
        DumpError: a key data file is damaged.
    """
    trained, generated = (keydata.load(run, name, step) for name in (TRAINED, GENERATED))
    theirs = {row.sample: row.values for row in generated if row.sample is not None}
    differences = []
    for row in trained:
        other = theirs.get(row.sample) if row.sample is not None else None
        if other is None or other.ndim != 1 or row.values.ndim != 1:
            continue
        own = _response(row.values, len(other))
        if own is not None:
            differences.append(own.astype(np.float64) - other.astype(np.float64))
    joined = np.concatenate([d[np.isfinite(d)] for d in differences] or [np.empty(0)])
    if not joined.size:
        return None
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.exp(joined) - joined - 1.0))
    table = np.full((len(differences), max(d.size for d in differences)), np.nan)
    for index, difference in enumerate(differences):
        finite = np.isfinite(difference)
        table[index, : difference.size][finite] = np.abs(difference[finite])
    # a position at which no sample has a number says nothing
    table = table[:, np.isfinite(table).any(axis=0)]
    return Mismatch(
        tokens=joined.size,
        samples=len(differences),
        mean_abs=float(np.abs(joined).mean()),
        max_abs=float(np.abs(joined).max()),
        k1=float(-joined.mean()),
        k3=k3,
        by_position=np.nanmean(table, axis=0),
    )


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
