"""Training log-probs against the engine's, on each side: is a gap the device's or the method's?

With d = log p_train - log p_rollout per response token, sampled from the rollout engine, KL from
rollout to training is estimated by k1 = mean(-d) and, with less variance and never below 0, by
k3 = mean(exp(d) - d - 1) (J. Schulman, Approximating KL divergence, 2020).

Only tokens that count are compared: those with mask 1 of the update (a tool's answer stands inside
the response with mask 0 and a log-prob of 0.0). Tokens without a finite log-prob are left out and
counted on either hand; half a run of NaN is no small gap.

A replay trains on the benchmark's rollouts, so the target's gap is its own training against the
benchmark's engine. Where engines were led through responses (``generation: compare``), each side's
own engine is known too. With T and E what a side's training and engine give a token, the target's
own gap is the benchmark's and what the device adds to it on either hand::

    T_t - E_t = (T_b - E_b) + (T_t - T_b) - (E_t - E_b)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlprobe.compare.samples.pairing import Key, joined, keyed
from rlprobe.judge import fits, forced, keydata
from rlprobe.store.read import Run

#: Bars for mean |d|, and for the mean of exp|d| (``multiplicative``). Above 0.01 Ascend's guide to
#: precision under verl asks to look into training against inference; 0.025 and 0.05 are what users
#: report to reach on GPUs and NPUs, without a source that could be named; 1.05 is what NeMo RL
#: accepts at equal precision (its guide "Add new models", expected error threshold).
BARS: dict[str, float] = {"general": 0.01, "gpu": 0.025, "npu": 0.05, "multiplicative": 1.05}
TRAINED, GENERATED = "old_log_probs", "rollout_log_probs"
#: Log-probs of an engine that was led through responses.
PREFILL, DECODE = (forced.log_probs(phase) for phase in forced.PHASES)
_ENTROPIES = "entropys"
_MARGINS = "forced_prefill_margins"
#: Masks over the response, by framework: verl's actor update, slime's.
MASKS = ("given_actor_mask", "loss_mask", "response_mask")


@dataclass(frozen=True)
class Mismatch:
    """One run's gap between training and rollout."""

    tokens: int
    samples: int
    mean_abs: float
    #: 99 of 100 tokens lie below.
    p99_abs: float
    max_abs: float
    k1: float
    k3: float
    #: Mean of exp|d|: by which factor a token's probability is another; 1 is none.
    multiplicative: float
    #: Importance ratios exp(d): 1 of 100 tokens lies below the first, 1 above the second.
    ratio_low: float
    ratio_high: float
    #: exp of minus the mean log-prob, of training and of the engine, over the same tokens.
    perplexity_trained: float
    perplexity_generated: float
    #: Tokens of responses that do not count (mask 0).
    masked: int
    #: Tokens that count and have no finite log-prob of the training, and of the engine.
    trained_nonfinite: int
    generated_nonfinite: int
    #: Mean |d| by position in the response, shape [longest response].
    by_position: npt.NDArray[np.float64]


def measure(run: Run, step: int, engine: str = GENERATED) -> Mismatch | None:
    """The gap of a run at a step; None where either log-prob is not among its key data.

    Where no token has both, ``tokens`` is 0 and the numbers are NaN.

    Args:
        run: its training and its engine.
        step: captured step, from 0.
        engine: name of the engine's log-probs; of responses that it was led through in part, those.

    Raises:
        DumpError: a key data file is damaged.
    """
    trained, generated = (keydata.load(run, name, step) for name in (TRAINED, engine))
    masks = _masks(run, step)
    differences, values = [], []
    masked = 0
    without = np.zeros(2, dtype=np.int64)
    for key, row, answer in joined(trained, generated):
        other = answer.values
        if other.ndim != 1 or row.values.ndim != 1:
            continue
        own = _training(row, len(other), engine)
        if own is None:
            continue
        counts = masks.get(key, np.ones(len(other), dtype=bool))
        if engine != GENERATED:
            counts = counts[: len(other)]
        if len(counts) != len(other):
            counts = np.ones(len(other), dtype=bool)
        masked += int(np.count_nonzero(~counts))
        pair = [np.where(counts, values.astype(np.float64), 0.0) for values in (own, other)]
        without += [int(np.count_nonzero(~np.isfinite(values))) for values in pair]
        with np.errstate(invalid="ignore"):  # infinity less infinity
            differences.append(np.where(counts, pair[0] - pair[1], np.nan))
        values.append(np.stack(pair))
    if not differences:
        return None
    gaps = np.concatenate([d[np.isfinite(d)] for d in differences])
    if not gaps.size:
        nan = float("nan")
        return Mismatch(
            0, len(differences), nan, nan, nan, nan, nan, nan, nan, nan, nan, nan,
            masked, int(without[0]), int(without[1]), np.empty(0),
        )  # fmt: skip
    counted = np.isfinite(np.concatenate(differences))
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.exp(gaps) - gaps - 1.0))
        multiplicative = float(np.mean(np.exp(np.abs(gaps))))
        low, high = np.exp(np.quantile(gaps, [0.01, 0.99]))
        perplexities = np.exp(-np.concatenate(values, axis=1)[:, counted].mean(axis=1))
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
        p99_abs=float(np.quantile(np.abs(gaps), 0.99)),
        max_abs=float(np.abs(gaps).max()),
        k1=float(-gaps.mean()),
        k3=k3,
        multiplicative=multiplicative,
        ratio_low=float(low),
        ratio_high=float(high),
        perplexity_trained=float(perplexities[0]),
        perplexity_generated=float(perplexities[1]),
        masked=masked,
        trained_nonfinite=int(without[0]),
        generated_nonfinite=int(without[1]),
        by_position=np.nanmean(table, axis=0),
    )


def temperature(run: Run, step: int, engine: str = GENERATED) -> fits.Fit | None:
    """The engine's temperature over training's, were that all that makes the gap.

    Args:
        run: its training and its engine.
        step: captured step, from 0.
        engine: name of the engine's log-probs.

    Returns:
        the ratio as ``coefficient`` and the share of the gap that it explains; None without
        entropies of training, or where too few tokens say.

    Raises:
        DumpError: a key data file is damaged.
    """
    trained, generated, entropies = (
        keydata.load(run, name, step) for name in (TRAINED, engine, _ENTROPIES)
    )
    known = keyed(entropies)
    masks = _masks(run, step)
    pairs, own_entropies = [], []
    for key, row, answer in joined(trained, generated):
        values, entropy = answer.values, known.get(key)
        if entropy is None or values.ndim != 1:
            continue
        own = _training(row, len(values), engine)
        spread = _training(entropy, len(values), engine)
        if own is None or spread is None:
            continue
        counts = np.isfinite(own) & np.isfinite(values) & np.isfinite(spread)
        mask = masks.get(key, counts)[: len(values)]
        if len(mask) == len(counts):
            counts &= mask
        pairs.append((own[counts].astype(np.float64), values[counts].astype(np.float64)))
        own_entropies.append((spread[counts].astype(np.float64), None))
    return fits.temperature(pairs, own_entropies) if pairs else None


def of_prompts(found: fits.Fit, sampled: object) -> bool:
    """Whether an engine's log-probs are at temperature 1 where training's are at the rollout's.

    That is how vLLM gives those of a prompt (its prefill), whatever the sampling.

    Args:
        found: of :func:`temperature`.
        sampled: the rollout's temperature, as it was recorded.
    """
    if not isinstance(sampled, int | float) or not 0 < sampled != 1 or found.error is None:
        return False
    return abs(found.coefficient * sampled - 1.0) <= 5 * found.error * sampled


def moved(benchmark: Run, target: Run, step: int, name: str) -> float | None:
    """Mean |difference| of both sides' log-probs of the same tokens: what the device makes.

    Args:
        benchmark, target: the two runs.
        step: captured step, from 0.
        name: of training's log-probs, or of an engine's that was led through responses.

    Returns:
        None where they are not among both sides' key data, or none is finite on both.

    Raises:
        DumpError: a key data file is damaged.
    """
    found = []
    masks = _masks(benchmark, step) if name == TRAINED else {}
    sides = (keydata.load(run, name, step) for run in (benchmark, target))
    for key, one, other in joined(*sides):
        left, right = one.values, other.values
        if left.shape != right.shape or left.ndim != 1:
            continue
        mask = masks.get(key)
        if mask is not None and one.response_at is not None:
            place = slice(one.response_at, one.response_at + len(mask))
            left, right = (values[place] for values in (left, right))
            if len(left) == len(mask):
                left, right = left[mask], right[mask]
        with np.errstate(invalid="ignore"):
            found.append(np.abs(right.astype(np.float64) - left.astype(np.float64)))
    gaps = np.concatenate(found) if found else np.empty(0)
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.mean()) if gaps.size else None


def near_ties(run: Run, step: int, within: float) -> float | None:
    """Share of tokens whose likeliest two lie within ``within`` nats; None where that is unknown.

    Raises:
        DumpError: a key data file is damaged.
    """
    margins = [row.values for row in keydata.load(run, _MARGINS, step)]
    every = np.concatenate(margins) if margins else np.empty(0)
    return float(np.mean(every <= within)) if every.size else None


def _masks(run: Run, step: int) -> dict[Key, npt.NDArray[np.bool_]]:
    """By sample and occurrence, which tokens of its response count; empty without a mask."""
    for name in MASKS:
        rows = keyed(keydata.load(run, name, step))
        found = {key: row.values.astype(bool) for key, row in rows.items() if row.values.ndim == 1}
        if found:
            return found
    return {}


def _training(row: keydata.Row, length: int, engine: str) -> keydata.Array | None:
    """Training's values of as many tokens of the response as the engine gave."""
    if engine == GENERATED:
        return _response(row.values, length)
    if row.response_at is None or row.response_at + length > len(row.values):
        return None
    return row.values[row.response_at : row.response_at + length]


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
