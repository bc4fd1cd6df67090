"""Where all modules agree and what is made of their outputs does not: results, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.around import Scene, Symptoms
from rlprobe.diagnose.cause.differences import Array, Fact, Margins, Record, Tokens
from rlprobe.diagnose.cause.hypotheses import permuted, subset, temperature
from rlprobe.dumps.key_names import INPUT_IDS, RESPONSES
from rlprobe.judge import execution, fits, forced, given
from rlprobe.judge.row import Row
from rlprobe.judge.row import first as first_row
from rlprobe.said import COMMA, NOTHING_SAID, Said, joined, of_side, say

#: A mean log-prob ratio on the policy's own data is round-off; this is no round-off.
_OFF_POLICY = 1e-3
#: The id of no token: what would follow the last.
_NO_TOKEN = -1
#: Log-probs, and the entropies of the same tokens.
_ENTROPY_OF = {"old_log_probs": "entropys", "update_log_probs": "update_entropys"}
#: Log-probs that an update of the policy computes, and those that it is given.
_OWN_LOG_PROBS, _GIVEN_LOG_PROBS = "update_log_probs", "given_old_log_probs"


def outcome(scene: Scene) -> Symptoms:
    """A stage's key data parts while every module agrees."""
    finding = scene.finding
    if scene.row.get("status") == "nonfinite":
        # how many values are not is said where it was found
        return Symptoms([Fact("nonfinite", (scene.origin.reason,))])
    for item in given.wrong(scene.step.key_data, finding.stage.name):
        if item.difference.name == scene.origin.operator:
            return Symptoms([_came_in(item)])
    differ = {o.name for o in finding.outcomes if o.excess > 1}
    moved = [d.name for d in finding.key_data if d.name in differ]
    found = Symptoms()
    for name in [*(n for n in moved if n in temperature.LOG_PROBS), *moved]:
        tokens = _tokens(scene, name)
        if tokens is not None and not found.differences:
            found = Symptoms([tokens, *_margins(scene, tokens)], _seen(scene, tokens, differ))
    if not found.seen:
        found.seen.append(
            say(
                "{operator} parts after the last module, by no law of the results alone",
                operator=scene.origin.operator,
            )
        )
    return found


def _margins(scene: Scene, tokens: Tokens) -> list[Margins]:
    """Of an engine that was led through responses: how far its choices lead."""
    phase = next((p for p in forced.PHASES if forced.log_probs(p) == tokens.name), None)
    found = [scene.step.key_data.get(f"forced_{phase}_{what}") for what in ("choices", "margins")]
    if phase is None or found[0] is None or found[1] is None:
        return []
    same = {sample: b == t for sample, b, t in found[0].pairs}
    parts = [(b[same[s]], t[same[s]]) for s, b, t in found[1].pairs if s in same]
    if not parts:
        return []
    own = np.concatenate([b for b, _ in tokens.values])
    noise = tokens.floor * float(np.sqrt(np.mean(own[np.isfinite(own)] ** 2)))
    sides = [np.concatenate([pair[side] for pair in parts]) for side in (0, 1)]
    return [Margins(sides[0], sides[1], noise)]


def _tokens(scene: Scene, name: str) -> Tokens | None:
    """A result of the stage with its entropies; None where it is not one number a token."""
    own = scene.step.key_data.get(name)
    if own is None or not own.pairs:
        return None
    outcome = next((o for o in scene.finding.outcomes if o.name == name), None)
    floor = 0.0 if outcome is None else outcome.floor
    near, known = _entropies(scene, name)
    values = {sample: (b, t) for sample, b, t in own.pairs}
    return Tokens(
        name, own.pairs, floor,
        None if near is None else [known[sample] for sample in near],
        () if near is None else [values[sample] for sample in near],
        not scene.finding.stage.misplaced,
        _ENTROPY_OF.get(name) in {o.name for o in scene.finding.outcomes},
        _ids(scene, own.pairs),
    )  # fmt: skip


def _ids(scene: Scene, pairs: Sequence[tuple[str, Array, Array]]) -> list[list[Array]]:
    """The token that each value may be of: at its own position, or the one that follows."""
    found = []
    for name in (RESPONSES, INPUT_IDS):
        tokens = scene.step.key_data.get(name)
        known = {} if tokens is None else {sample: ids for sample, ids, _ in tokens.pairs}
        own = [known.get(sample) for sample, _, _ in pairs]
        ids = [row for row in own if row is not None]
        alike = (
            i is not None and i.shape == b.shape for i, (_, b, _) in zip(own, pairs, strict=True)
        )
        if all(alike):
            found += [ids, [np.append(row[1:], _NO_TOKEN) for row in ids]]
    return found


def _entropies(scene: Scene, name: str) -> tuple[list[str] | None, dict[str, Any]]:
    """Samples whose entropies are known, and those.

    The computation's own, or those of the log-prob stage, whose logits the update's are.
    """
    own = scene.step.key_data[name]
    for other, theirs in [
        (_ENTROPY_OF.get(name), True), *[("entropys", False)] * (name == _OWN_LOG_PROBS)
    ]:  # fmt: skip
        entropies = scene.step.key_data.get(other or "")
        if entropies is None:
            continue
        known = {sample: (b, t if theirs else None) for sample, b, t in entropies.pairs}
        shared = [sample for sample, _, _ in own.pairs if sample in known]
        if shared:
            return shared, known
    return None, {}


def _seen(scene: Scene, tokens: Tokens, differ: set[str]) -> list[Said]:
    """What agrees, how many tokens differ, and what a temperature leaves."""
    said = [] if scene.finding.stage.misplaced else [say("logits agree")]
    entropy = _ENTROPY_OF.get(tokens.name)
    if tokens.measured:
        said.append(say("entropies differ too") if entropy in differ else say("entropies agree"))
    said.append(say("{name}: {what}", name=tokens.name, what=subset.counted(tokens.values)))
    if tokens.name not in temperature.LOG_PROBS:
        return said
    near = temperature.fitted(tokens)
    if near is not None and 1.0 - near.explained > temperature.LEAVES:
        said.append(
            say(
                "to first order another temperature explains {explained:.0%} of the difference",
                explained=near.explained,
            )
        )
    if fits.one_sided(tokens.values):
        said.append(
            say("{name} are larger on the target wherever they differ much", name=tokens.name)
        )
    return said


def loss(scene: Scene) -> Symptoms:
    """The loss, or the first gradient that it sends back, parts."""
    finding, step = scene.finding, scene.step
    if scene.row.get("status") == "nonfinite":
        return Symptoms([Record(scene.row, [scene.row])])
    for item in given.wrong(step.key_data, finding.stage.name):
        return Symptoms([_came_in(item)])
    lone = lone_parts(finding.stage.rows)
    if lone:
        return Symptoms(
            [
                Fact(
                    "loss",
                    (
                        say(
                            "the loss has a part on one side only: {lone}", lone=joined(lone, COMMA)
                        ),
                    ),
                )
            ]
        )
    found = Symptoms()
    ratio = _off_policy(finding.stage.rows)
    if ratio is not None:
        found = _whose_log_probs(scene, *ratio)
    first = _first_gradient(finding.stage.rows)
    row = scene.row if first is None else first
    record = Record.of(finding, row, inside=False, what=say("gradient that the loss sends back"))
    found.differences.append(record)
    found.seen += _described(record, first is not None)
    return found


def _came_in(item: given.Wrong) -> Fact:
    """What an update was given wrongly: other tokens, other samples' numbers, or other numbers."""
    if item.is_mask:
        return Fact("label_or_mask_shift", (item.said,))
    found = item.difference
    law = permuted.OfSamples().fit(Tokens(found.name, found.pairs, item.allowed))
    if law is not None and law.holds:
        return Fact(law.cause, (item.said, *law.said))
    return Fact("data", (item.said,))


def _described(record: Record, is_gradient: bool) -> list[Said]:
    said = [say("the loss makes other values or gradients of the same outputs")]
    apart = measure.sizes(record.every) if is_gradient else None
    if apart is not None:
        low, high = (measure.times(size) for size in apart)
        said[0] += say(": {low} to {high} times as large, by micro-batch", low=low, high=high)
    if is_gradient and measure.lacks(record.row):
        said.append(
            say(
                "the gradient that the loss sends back is as where a part of it "
                "({error:.1%} of its square) is set to 0 and the rest is as before",
                error=measure.of(record.row).error ** 2,
            )
        )
    return said


def lone_parts(rows: pl.DataFrame) -> list[Said]:
    """Parts of the loss that one side alone has, with the side."""
    lone = rows.filter(
        (pl.col("slot") == "loss") & pl.col("status").is_in(["benchmark_only", "target_only"])
    )
    return sorted(
        {
            say("{index} ({side})", index=index, side=of_side(status.removesuffix("_only")))
            for index, status in lone.select("index", "status").iter_rows()
        }
    )


def _whose_log_probs(scene: Scene, ratio: str, size: float) -> Symptoms:
    """Whether another ratio of log-probs comes from the update's own or from those it was given.

    Args:
        scene: the update that parts.
        ratio: what is said of it.
        size: by how much its mean differs, in nats.
    """
    finding, step = scene.finding, scene.step
    own = next((o for o in finding.outcomes if o.name == _OWN_LOG_PROBS), None)
    if own is not None and own.excess > 1:
        differ = {o.name for o in finding.outcomes if o.excess > 1}
        tokens = _tokens(scene, _OWN_LOG_PROBS)
        said = [
            say(
                "{ratio}: the update's own log-probs differ by {error:.2g}",
                ratio=ratio,
                error=own.error,
            )
        ]
        if tokens is None:
            return Symptoms([], said)
        return Symptoms([tokens], [*said, *_seen(scene, tokens, differ)])
    old = step.key_data.get(_GIVEN_LOG_PROBS)
    moved = 0.0 if old is None else old.error or 0.0
    if old is not None and old.max_abs >= size and moved > (0.0 if own is None else own.error):
        agree = NOTHING_SAID
        if own is not None:
            agree = say(
                ", although the update's own log-probs agree (they differ by {error:.2g})",
                error=own.error,
            )
        return Symptoms(
            [
                Fact(
                    "data",
                    (
                        say(
                            "{ratio}{agree}: the old log-probs that it was given differ by "
                            "{moved:.3g}. The difference came in with them, from the stage that "
                            "computed them",
                            ratio=ratio,
                            agree=agree,
                            moved=moved,
                        ),
                    ),
                )
            ]
        )
    if old is None:
        return Symptoms(
            [],
            [
                say(
                    "{ratio}; neither the log-probs it computes nor those given are known",
                    ratio=ratio,
                )
            ],
        )
    return Symptoms(
        [], [say("{ratio}, and the old log-probs that the update was given agree", ratio=ratio)]
    )


def _off_policy(rows: pl.DataFrame) -> tuple[Said, float] | None:
    """A log-prob ratio that is 1 on the benchmark and not on the target: in words, and its size."""
    losses = rows.filter(
        pl.col("judged")
        & (pl.col("phase") == execution.LOSS)
        & pl.col("index").str.contains("ppo_kl|approx_kl")
    )
    values = [
        pl.coalesce(f"max_{side}", pl.col(f"value_{side}").cast(pl.Float64, strict=False))
        for side in ("benchmark", "target")
    ]
    for name, b, t in losses.select("index", *values).iter_rows():
        if b is not None and t is not None and abs(b) < _OFF_POLICY < abs(t):
            return say(
                "{name} is {b:.2g} on the benchmark and {t:.2g} on the target", name=name, b=b, t=t
            ), abs(t - b)
    return None


def _first_gradient(rows: pl.DataFrame) -> Row | None:
    gradients = rows.filter(
        pl.col("judged")
        & (pl.col("phase") == execution.BACKWARD)
        & (pl.col("slot") == "input")
        & pl.col("beyond")
    )
    return first_row(gradients)
