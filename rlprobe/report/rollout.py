"""The page's section on engine and training: how far apart, by what, from which layer on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from rlprobe.diagnose import mismatch, rollout
from rlprobe.diagnose.engine_layers import Block, Layers
from rlprobe.diagnose.rollout import Parts
from rlprobe.errors import ReplayError
from rlprobe.judge import forced
from rlprobe.judge.analysis import Step
from rlprobe.report import chart, words
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.rollouts import Rollouts, hdf5, responses
from rlprobe.store.read import Run

_COLUMNS = ("mean_d", "p99_d", "max_d", "k1", "k3", "ratio_low", "ratio_high", "ppl_train",
            "ppl_rollout", "multiplicative", "mask_0", "train_nonfinite",
            "rollout_nonfinite")  # fmt: skip
#: Which log-probs of an engine a row is against, and the text that says so.
_AGAINST = {
    mismatch.GENERATED: "engine_generated",
    mismatch.PREFILL: "engine_prefill",
    mismatch.DECODE: "engine_decode",
}


@dataclass(frozen=True)
class GapRow:
    """Training against an engine on one side at one step."""

    step: int
    side: str
    against: Markup
    tokens: int
    numbers: list[float]


@dataclass(frozen=True)
class PartsRow:
    """What a step's gap is made of, and where it begins; None of what is not known."""

    step: int
    method: float | None
    training: float | None
    prefill: float | None
    decode: float | None
    near_ties: float | None
    #: Of each side: choices of experts that are others, and the block where the gap begins.
    routed: list[str | None]
    begins: list[Markup]


#: Its numbers.
_PARTS = ("method", "training", "prefill", "decode", "near_ties")


@dataclass(frozen=True)
class PhaseRow:
    """Both sides' engines on the same responses."""

    phase: Markup
    samples: int
    tokens: int
    largest: float
    parted: int
    near: int


@dataclass(frozen=True)
class PartingRow:
    """Where a sample's choice parts first."""

    phase: Markup
    sample: str
    token: int
    benchmark: int
    target: int
    moved: float
    near: bool


@dataclass(frozen=True)
class Gap:
    """Training against rollout, both sides, and engine against engine."""

    columns: list[Markup]
    rows: list[GapRow]
    parts: list[PartsRow]
    bars: dict[str, str]
    svg: Markup | None
    #: Which part of a gap is the method's and which the device's, near ties, and where it begins.
    said: list[Markup]
    blocks: dict[str, list[Block]]
    #: Whether each side's engine repeats itself in another batch.
    repeats: list[Markup] = field(default_factory=list)
    phases: list[PhaseRow] = field(default_factory=list)
    partings: list[PartingRow] = field(default_factory=list)

    @property
    def known(self) -> list[str]:
        """Parts of the gap that any step knows: the others would be columns of nothing."""
        return [name for name in _PARTS if any(getattr(r, name) is not None for r in self.parts)]

    @property
    def routed_known(self) -> bool:
        """Whether anything is known of routers."""
        return any(text is not None for row in self.parts for text in row.routed)


def gap(benchmark: Run, target: Run, step: Step) -> Gap | None:
    """The section; None where no engine's log-probs are among the key data.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    every = rollout.of(benchmark, target, step.number)
    if not every.gaps:
        return None
    measured = {
        one.side: one.found
        for one in every.gaps
        if (one.step, one.against) == (step.number, mismatch.GENERATED)
    }
    parts = next(parts for parts in every.parts if parts.step == step.number)
    lines = [(side, found.by_position.tolist()) for side, found in measured.items()]
    drawn = any(value > 0 for _, line in lines for value in line)
    blocks = {side: found.blocks for side, found in parts.layers.items() if found.blocks}
    choices = forced.of_step(step)
    recorded = _recorded(benchmark, step.number)
    ids = {} if recorded is None else {s.sample_digest: s.id for s in recorded.samples}
    return Gap(
        columns=[words.both(key) for key in _COLUMNS],
        rows=[_row(gap) for gap in every.gaps],
        parts=[_parts_row(parts) for parts in every.parts],
        bars={name: f"{bar:g}" for name, bar in mismatch.BARS.items()},
        svg=chart.by_position(lines, mismatch.BARS["general"]) if drawn else None,
        said=[*_parts(parts),
              *_temperatures(benchmark, target, step.number, recorded), *_begins(blocks),
              *_routed(parts.layers), *_responses(recorded)],
        blocks=blocks,
        repeats=list(_repeats(benchmark, target, step.number)),
        phases=[
            PhaseRow(words.both(f"phase_{c.phase}"), c.samples, c.tokens, c.largest,
                     len(c.partings), sum(p.near_tie for p in c.partings))
            for c in choices
        ],
        partings=[
            PartingRow(words.both(f"phase_{c.phase}"), ids.get(p.sample, p.sample[:19]),
                       p.token, p.benchmark, p.target, p.moved, p.near_tie)
            for c in choices
            for p in c.first.values()
        ],
    )  # fmt: skip


def _recorded(benchmark: Run, step: int) -> Rollouts | None:
    """The step's rollouts; None where they are not there."""
    path = benchmark.rollouts.get(step)
    if path is None:
        return None
    try:
        return hdf5.read(path)
    except ReplayError:
        return None  # the gate says that it cannot be read


def _responses(recorded: Rollouts | None) -> Iterator[Markup]:
    """What is odd about the responses that all sides train on."""
    found = None if recorded is None else responses.look(recorded)
    if found is None:
        return

    def counted(ids: tuple[str, ...] | None) -> str:
        return _known(None if ids is None else len(ids))

    yield words.both(
        "responses_odd", count=found.count, looping=counted(found.looping),
        garbled=counted(found.garbled), empty=counted(found.empty), cut=counted(found.cut),
    )  # fmt: skip


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)


def _row(gap: rollout.Gap) -> GapRow:
    found = gap.found
    numbers = [
        found.mean_abs, found.p99_abs, found.max_abs, found.k1, found.k3,
        found.ratio_low, found.ratio_high, found.perplexity_trained, found.perplexity_generated,
        found.multiplicative, found.masked,
        found.trained_nonfinite, found.generated_nonfinite,
    ]  # fmt: skip
    return GapRow(gap.step, gap.side, words.both(_AGAINST[gap.against]), found.tokens, numbers)


def _parts_row(parts: Parts) -> PartsRow:
    layers = [parts.layers.get(side) for side in (BENCHMARK, TARGET)]
    routed = [None if found is None else found.routed for found in layers]
    return PartsRow(
        parts.step, parts.method, parts.training, parts.prefill, parts.decode, parts.near_ties,
        [None if found is None else f"{found[0]} / {found[1]}" for found in routed],
        [_where(found) for found in layers],
    )  # fmt: skip


def _where(layers: Layers | None) -> Markup:
    if layers is None or any(block.allowed is None for block in layers.blocks):
        return words.both("gap_begins_unknown")
    begins = layers.begins
    return words.both("gap_begins_nowhere") if begins is None else escape(begins.module)


def _parts(parts: Parts) -> Iterator[Markup]:
    """What is the method's, what the device's, and how many tokens are near ties."""
    if parts.method is None or parts.training is None:
        return
    given = {"method": f"{parts.method:.2g}", "training": f"{parts.training:.2g}"}
    if parts.prefill is None or parts.decode is None:
        yield words.both("gap_of_training", **given)
    else:
        yield words.both("gap_of_both", **given, prefill=f"{parts.prefill:.2g}",
                         decode=f"{parts.decode:.2g}")  # fmt: skip
    if parts.near_ties is None:
        yield words.both("gap_ties_unknown")
    else:
        yield words.both("gap_ties", share=f"{parts.near_ties:.1%}", within=f"{parts.within:.2g}")


def _routed(layers: Mapping[str, Layers]) -> Iterator[Markup]:
    """Which routers send tokens to other experts in the engine than in training."""
    for side, found in layers.items():
        if found.routed is None:
            continue
        otherwise, tokens = found.routed
        first = next((router for router in found.routers if router.otherwise), None)
        yield words.both(
            "gap_routed", side_en=words.text(side, "en"), side_zh=words.text(side, "zh"),
            otherwise=otherwise, tokens=tokens, routers=len(found.routers),
            first="–" if first is None else first.module,
        )  # fmt: skip


def _repeats(benchmark: Run, target: Run, step: int) -> Iterator[Markup]:
    """Whether engines give the same again, and in another batch."""
    for side, run in (("benchmark", benchmark), ("target", target)):
        found = forced.repeated(run, step)
        if found is not None:
            yield words.both(
                "repeats", side_en=words.text(side, "en"), side_zh=words.text(side, "zh"),
                count=found.samples, again=_known(found.again), same=found.same,
                drawn=_known(found.drawn),
                largest="?" if found.largest is None else f"{found.largest:.2g}",
            )  # fmt: skip


#: Less than that in the mean is round-off of any format, and what explains it says little.
_A_GAP = 1e-3
#: Standard error of a temperature's ratio, relative to its distance from 1, where it is one: of
#: anything else that moves log-probs it is of order one.
_SHARP = 0.02


def _temperatures(
    benchmark: Run, target: Run, step: int, recorded: Rollouts | None
) -> Iterator[Markup]:
    """Where an engine's log-probs are those of another temperature than training's."""
    sampled = None if recorded is None else recorded.sampling.get("temperature")
    for engine, against in _AGAINST.items():
        for side, run in (("benchmark", benchmark), ("target", target)):
            gap = mismatch.measure(run, step, engine)
            if gap is None or not gap.mean_abs > _A_GAP:
                continue
            found = mismatch.temperature(run, step, engine)
            if found is None or found.error is None:
                continue
            if not found.error <= _SHARP * abs(found.coefficient - 1.0):
                continue
            side_of = {"side_en": words.text(side, "en"), "side_zh": words.text(side, "zh")}
            if engine == mismatch.PREFILL and mismatch.of_prompts(found, sampled):
                yield words.together(("gap_of_prompts", {**side_of, "temperature": sampled}))
                continue
            yield words.together(
                ("gap_temperature", {
                    **side_of,
                    "engine_en": words.text(against, "en"),
                    "engine_zh": words.text(against, "zh"),
                    "ratio": f"{found.coefficient:.3g}", "error": f"{found.error:.1g}",
                })
            )  # fmt: skip


def _begins(blocks: dict[str, list[Block]]) -> Iterator[Markup]:
    """From which layer on engine and training part, on each side."""
    if not blocks:
        yield words.both("gap_layers_unknown")
    for side, found in blocks.items():
        name = {"side_en": words.text(side, "en"), "side_zh": words.text(side, "zh")}
        first = next((block for block in found if block.parts), None)
        if first is not None:
            yield words.both("gap_begins", **name, module=first.module, error=f"{first.median:.2g}",
                             allowed=f"{first.allowed or 0.0:.2g}")  # fmt: skip
        elif all(block.allowed is not None for block in found):
            nearest = max(block.median / (block.allowed or 1.0) for block in found)
            yield words.both("gap_none_begins", **name, count=len(found), nearest=f"{nearest:.2g}")
        else:
            yield words.both("gap_not_judged", **name)
