"""What a stage's results may differ by because of what it was given.

An update computes its loss from data of earlier stages: old and reference log-probs, values,
returns, advantages. Where those differ within their noise (another kernel in the scoring stages),
the update's loss and the gradients it sends back differ as well, although everything that the
update computed itself may be bitwise equal. To first order, with the ratio
r = exp(log p - old), advantages A and means over the tokens of a sample, ::

    |d policy loss| <= mean r (|dA| + |A| |d old|)
    |d kl|          <= mean |d ref| exp(|ref - log p| + |d ref|)     k1, k2, k3, |.| alike
    |d value loss|  <= mean |v - R| |dR| + dR**2 / 2
    |dg| / |g|       = ||r (dA + A d old) + c d ref|| / ||A r||,     critic: ||dR|| / ||v - R||

with c the coefficient of the KL term. A share of clipped tokens is a step function and no bound of
this kind holds; at most the tokens for which one threshold lies between both sides' log-ratios
change sides.

Only differences that their source explains count; what came in between stays a difference
(:mod:`rlprobe.judge.given`). A copy, or a part of it, has at most the norm of its source's
difference. Advantages and returns are linear in the values: with lambda and gamma of at most 1, the
operator of generalised advantages has a norm of at most 2 (J. Schulman et al., High-dimensional
continuous control using generalized advantage estimation, 2016: -1 plus gamma (1 - lambda) times a
geometric series), 3 for returns, and whitening rescales and shifts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from rlprobe import stages
from rlprobe.compare.samples.pairing import Key, keyed
from rlprobe.judge import keydata
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Array, Row
from rlprobe.judge.noise import Inherited
from rlprobe.roles import BENCHMARK, TARGET

OLD, REFERENCE, VALUES, RETURNS = (
    "given_old_log_probs",
    "given_ref_log_prob",
    "given_values",
    "given_returns",
)
_COPIES = {name: source for name, (source, _) in keydata.GIVEN.items() if source}
_LOG_PROBS, _NEW_VALUES = "update_log_probs", "update_values"
_MASKS = {stages.ACTOR_UPDATE: "given_actor_mask", stages.CRITIC_UPDATE: "given_critic_mask"}
#: Norms of the operators that make advantages and returns of values.
_OF_VALUES = {keydata.ADVANTAGES: 2.0, RETURNS: 3.0}
#: Key data of any stage that an update's results may follow from.
_OF_ANY = frozenset({*_COPIES, *_COPIES.values(), *_OF_VALUES, _LOG_PROBS, _NEW_VALUES})
#: All of them, masks as well.
NAMES = _OF_ANY | frozenset(_MASKS.values())
#: Whitening divides by a deviation and subtracts a mean that differ as well.
_WHITENED = 2.0
#: A copy may have been cast.
_CAST = 1.0 + 1e-3
#: Round-off of what was computed from sources in fp32, relative to its norm.
_LAST_BITS = 4.0 * 2.0**-24
#: Loss parts that depend on some of the given data only; others on all.
_PARTS = (
    (re.compile(r"clipfrac"), "clipped"),
    (re.compile(r"kl_coef|entropy|vpred"), None),
    (re.compile(r"ppo_kl|approx_kl"), "old"),
    (re.compile(r"kl"), "kl"),
    (re.compile(r"pg_loss|policy"), "policy"),
    (re.compile(r"vf_loss|value"), "value"),
)
_COEFFICIENT = re.compile(r"kl_coef")


@dataclass(frozen=True)
class _Sample:
    """One sample's given data on both sides, over its response."""

    rank: int
    micro_step: int
    #: Benchmark and target by name, all of one length.
    values: Mapping[str, tuple[Array, Array]]
    mask: Array

    def of(self, name: str, fallback: float = 0.0) -> Array:
        """The benchmark's values."""
        return self.values[name][0] if name in self.values else np.full(len(self.mask), fallback)

    def moved(self, name: str) -> Array:
        """|target - benchmark|."""
        if name not in self.values:
            return np.zeros(len(self.mask))
        left, right = self.values[name]
        difference: Array = np.abs(right - left)
        return difference


def inherited(results: Results, stage: str, step: int, rows: pl.DataFrame) -> Inherited | None:
    """What an update's losses and gradients may differ by; None for other stages.

    Args:
        results: where both runs are found.
        stage: canonical name.
        step: captured step, from 0.
        rows: the stage's records, for the names of its losses.

    Raises:
        DumpError: key data are damaged.
    """
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    if stage not in _MASKS or runs[0] is None or runs[1] is None:
        return None
    shared = {*_OF_ANY, _MASKS[stage]} & set(keydata.names(runs[0])) & set(keydata.names(runs[1]))
    data = {
        name: [keyed(keydata.load(run, name, step)) for run in runs if run is not None]
        for name in shared
    }
    losses = rows.filter(pl.col("slot") == "loss").select("rank", "name", "call", "value_benchmark")
    return of(data, stage, losses)


def of(
    data: Mapping[str, list[dict[Key, Row]]], stage: str, losses: pl.DataFrame
) -> Inherited | None:
    """:func:`inherited` of data at hand.

    Args:
        data: both sides' rows by name, by sample.
        stage: canonical name of an update.
        losses: rank, name, call (micro-batch) and value of the stage's losses.
    """
    samples = list(_samples(data, stage))
    if not samples or not any((s.moved(n) > 0).any() for s in samples for n in s.values):
        return None
    weight = _coefficient(losses)
    parts: dict[tuple[int, int], dict[str, float]] = {}
    squares: dict[tuple[int, int], list[float]] = {}
    critic = stage == stages.CRITIC_UPDATE
    for sample in samples:
        at = (sample.rank, sample.micro_step)
        found = _value(sample) if critic else _policy(sample, weight)
        seen = parts.setdefault(at, {})
        for name, bound in found.items():
            seen[name] = max(seen.get(name, 0.0), bound)
        terms = _value_gradient(sample) if critic else _policy_gradient(sample, weight)
        sums = squares.setdefault(at, [0.0, 0.0])
        for position, term in enumerate(terms):
            sums[position] += float(np.sum(term[sample.mask] ** 2))
    return Inherited(_by_name(losses, parts), _by_pass(squares))


def _by_name(losses: pl.DataFrame, parts: dict[tuple[int, int], dict[str, float]]) -> pl.DataFrame:
    bounds = []
    for rank, name, call, _ in losses.iter_rows():
        part = next((part for known, part in _PARTS if known.search(name)), "total")
        found = parts.get((rank, call), {})
        bounds.append((rank, name, found.get(part, 0.0) if part else 0.0))
    return pl.DataFrame(
        bounds,
        schema={"rank": losses.schema["rank"], "name": pl.String, "inherited": pl.Float64},
        orient="row",
    ).unique(["rank", "name"], keep="first")


def _by_pass(squares: dict[tuple[int, int], list[float]]) -> dict[tuple[int, int], float]:
    return {
        at: float(np.sqrt(moved / size)) if size > 0 else (np.inf if moved > 0 else 0.0)
        for at, (moved, size) in squares.items()
    }


def _policy(sample: _Sample, weight: float) -> dict[str, float]:
    ratio = _ratio(sample)
    advantage, old = sample.moved(keydata.ADVANTAGES), sample.moved(OLD)
    size = np.abs(sample.of(keydata.ADVANTAGES))
    policy = ratio * (advantage + (size + advantage) * np.expm1(np.minimum(old, 20.0)))
    reference = sample.moved(REFERENCE)
    apart = np.abs(sample.of(REFERENCE) - sample.of(_LOG_PROBS)) if _knows(sample) else 0.0
    kl = reference * np.exp(np.minimum(apart + reference, 20.0))
    found = {"policy": _mean(sample, policy), "kl": _mean(sample, kl), "old": _mean(sample, old)}
    found["total"] = found["policy"] + weight * found["kl"]
    found["clipped"] = _crossing(sample) if old.any() or advantage.any() else 0.0
    return found


def _policy_gradient(sample: _Sample, weight: float) -> tuple[Array, Array]:
    ratio, size = _ratio(sample), np.abs(sample.of(keydata.ADVANTAGES))
    moved = sample.moved(keydata.ADVANTAGES) + size * sample.moved(OLD)
    return ratio * moved + weight * sample.moved(REFERENCE), ratio * size


def _value(sample: _Sample) -> dict[str, float]:
    moved = sample.moved(RETURNS)
    bound = _mean(sample, _distance(sample) * moved + moved**2 / 2)
    clipped = 1.0 if moved.any() or sample.moved(VALUES).any() else 0.0
    return {"value": bound, "total": bound, "clipped": clipped}


def _value_gradient(sample: _Sample) -> tuple[Array, Array]:
    return sample.moved(RETURNS), _distance(sample)


def _distance(sample: _Sample) -> Array:
    """|v - R|; of the old values where the new ones are not known."""
    name = _NEW_VALUES if _NEW_VALUES in sample.values else VALUES
    distance: Array = np.abs(sample.of(name) - sample.of(RETURNS))
    return distance


def _knows(sample: _Sample) -> bool:
    return _LOG_PROBS in sample.values and REFERENCE in sample.values


def _ratio(sample: _Sample) -> Array:
    if _LOG_PROBS not in sample.values or OLD not in sample.values:
        return np.ones(len(sample.mask))
    ratio: Array = np.exp(np.clip(sample.of(_LOG_PROBS) - sample.of(OLD), -20.0, 20.0))
    return ratio


def _crossing(sample: _Sample) -> float:
    """Largest share of tokens that one threshold on the log-ratio can tell apart."""
    if OLD not in sample.values or not sample.mask.any():
        return 1.0
    x = sample.of(_LOG_PROBS) - sample.of(OLD)
    y = x + sample.values[OLD][0] - sample.values[OLD][1]
    low, high = np.minimum(x, y)[sample.mask], np.maximum(x, y)[sample.mask]
    most = max(int(np.sum((low <= edge) & (edge <= high))) for edge in (*low, *high))
    return min(1.0, 2.0 * most / int(sample.mask.sum()))  # one threshold on either side


def _mean(sample: _Sample, terms: Array) -> float:
    return float(np.mean(terms[sample.mask])) if sample.mask.any() else 0.0


def _coefficient(losses: pl.DataFrame) -> float:
    """Weight of the KL term as the loss reports it; 1 where it reports a KL and no weight."""
    found = [
        abs(float(value))
        for _, name, _, value in losses.iter_rows()
        if _COEFFICIENT.search(name) and value is not None
    ]
    if found:
        return max(found)
    return 1.0 if losses.get_column("name").str.contains("kl_loss").any() else 0.0


def _samples(data: Mapping[str, list[dict[Key, Row]]], stage: str) -> Iterator[_Sample]:
    """Samples with the given data whose differences their sources explain."""
    critic = stage == stages.CRITIC_UPDATE
    own = [VALUES, RETURNS] if critic else [keydata.ADVANTAGES, OLD, REFERENCE]
    new = _NEW_VALUES if critic else _LOG_PROBS
    at = RETURNS if critic else keydata.ADVANTAGES
    explained = [name for name in own if name in data and _is_explained(data, name)]
    for key, row in data.get(at, [{}, {}])[0].items():
        length = len(row.values) if row.values.ndim == 1 else 0
        values = {}
        for name in (*own, new):
            pair = _pair(data, name, key, length)
            if pair is None:
                continue
            left, right = pair
            # unexplained differences, and the update's own, are no excuse
            values[name] = (left, right if name in explained else left)
        mask = _pair(data, _MASKS[stage], key, length)
        used = mask[0].astype(bool) if mask is not None else np.ones(length, dtype=bool)
        if length:
            yield _Sample(row.rank, row.micro_step, values, used)


def _pair(
    data: Mapping[str, list[dict[Key, Row]]], name: str, key: Key, length: int
) -> tuple[Array, Array] | None:
    """Both sides' values over the response; None where they do not reach it or are not finite."""
    if name not in data or any(key not in side for side in data[name]):
        return None
    found = []
    for side in data[name]:
        row = side[key]
        values = row.values.astype(np.float64)
        if values.ndim != 1 or len(values) < length or not np.isfinite(values).all():
            return None
        # over a sequence, entry i is about token i + 1, and the last about none
        begin = row.response_at or 0 if len(values) > length else 0
        found.append(values[begin : begin + length])
    return (found[0], found[1]) if len(found[0]) == len(found[1]) == length else None


def _is_explained(data: Mapping[str, list[dict[Key, Row]]], name: str) -> bool:
    moved, size = _moved(data, name), _size(data, name)
    last = _LAST_BITS * size
    if name in _COPIES:
        return moved <= _CAST * _moved(data, _COPIES[name]) + last
    source = _OF_VALUES[name] * _moved(data, "values")
    if name == keydata.ADVANTAGES:
        source *= _WHITENED * _whitening(data)
    return moved <= source + last


def _whitening(data: Mapping[str, list[dict[Key, Row]]]) -> float:
    """By what advantages were divided: their spread before (returns - values) over that after."""
    if not {VALUES, RETURNS, keydata.ADVANTAGES} <= data.keys():
        return 1.0
    raw, white = [], []
    for key, row in data[keydata.ADVANTAGES][0].items():
        pairs = [_pair(data, name, key, len(row.values)) for name in (RETURNS, VALUES)]
        if pairs[0] is not None and pairs[1] is not None:
            raw.append(pairs[0][0] - pairs[1][0])
            white.append(row.values)
    if not raw:
        return 1.0
    before, after = np.std(np.concatenate(raw)), np.std(np.concatenate(white))
    return max(1.0, float(after / before)) if before > 0 else 1.0


def _moved(data: Mapping[str, list[dict[Key, Row]]], name: str) -> float:
    """L2 norm of the difference over all joined samples."""
    if name not in data:
        return 0.0
    left, right = data[name]
    total = 0.0
    for key, row in left.items():
        if key not in right:
            continue
        b, t = row.values, right[key].values
        if b.shape == t.shape:
            total += float(np.sum((t.astype(np.float64) - b.astype(np.float64)) ** 2))
    return float(np.sqrt(total))


def _size(data: Mapping[str, list[dict[Key, Row]]], name: str) -> float:
    squares = (np.sum(row.values.astype(np.float64) ** 2) for row in data[name][0].values())
    return float(np.sqrt(sum(squares)))
