"""The gate of two dumps: what can be known of them, and what only a run would say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlprobe import stages
from rlprobe.compare import measures
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import (
    batch,
    configuration,
    differing,
    extent,
    formats,
    judged,
    recorded,
    samples,
    settings,
    unmeasured,
    unused,
    weights,
)
from rlprobe.diagnose.gate.check import Gate
from rlprobe.diagnose.gate.evidence import Shut, caveat, opened, shut
from rlprobe.diagnose.gate.unmeasured import UNKNOWN
from rlprobe.dumps import framework
from rlprobe.dumps import results as tables
from rlprobe.dumps.results import of_key_data_alone
from rlprobe.errors import DumpError
from rlprobe.judge import equipped, generated, sources
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.extent import Extents
from rlprobe.judge.generated import Generated
from rlprobe.judge.inputs import Results
from rlprobe.roles import TARGET
from rlprobe.said import COMMA, SEMICOLON, Said, joined, listed, restored, say

#: Items of an alignment that follow from what a run records of itself, and what to do instead.
_OF_RUNS = {
    samples.PROOF: say("make sure that both sides were given the same samples"),
    batch.REWARDS: say("save them as key data on both sides, or compare them by hand"),
    batch.ADVANTAGES: say("save them as key data on both sides, or compare them by hand"),
    settings.SAMPLING: say(
        "check temperature and whether log-probs are of raw or processed logits"
    ),
    configuration.CONFIGURATION: say("compare the two command lines"),
    settings.LAYOUT: say("check that ranks of one number hold the same shards"),
    settings.PRECISION: say("check autocast, TF32 and HF32 on both sides"),
    extent.CONTROL: say("dump the benchmark twice: what it differs from itself by is no fault"),
}
#: Item of two dumps of two frameworks.
_FRAMEWORK = "framework"
#: Item of what else is kept of a sample.
_FIELDS = "fields of samples"


def check(results: Results, step: Step, extents: Extents) -> Gate:
    """Everything that the records of both dumps can say, the rest as caveats.

    Raises:
        DumpError: a table is damaged.
    """
    first = _first_stage(step)
    rollouts = generated.found(step)
    if rollouts is None:
        tokens, other_tokens = _samples(results, step) or _tokens(first)
        given, other_rewards = batch.of_dumps(step.key_data)
    else:
        tokens, other_tokens = _responses(rollouts, step)
        given, other_rewards = _rewards(rollouts, step)
    asked, other_settings = _configuration(results)
    given += asked
    precision = formats.of_dumps(results, step)
    given += [precision] if precision is not None else []
    known = {item.item for item in given}
    weight, other_weights = _weights(first)
    held = judged.item(results, step, extents)
    hidden = unused.check(step)
    unlike = recorded.of_dumps(step)
    unsized = differing.check(step)
    return Gate(
        [
            tokens,
            weight,
            _stages(results, step),
            *_frameworks(results),
            extent.coverage_item(results, step),
            _capture(step),
            *given,
            *(
                caveat(item, UNKNOWN, action)
                for item, action in _OF_RUNS.items()
                if item not in known
            ),
            *([held] if held is not None else []),
            *([hidden] if hidden is not None else []),
            *([unlike] if unlike is not None else []),
            *([unsized] if unsized is not None else []),
        ],
        other_tokens or other_weights or other_rewards or other_settings,
    )


def _configuration(results: Results) -> tuple[list[GateItem], Shut | None]:
    """What was asked of each side, where its tree says so."""
    said = tables.sides(results.directory)
    if said is None:
        return [], None
    try:
        found = configuration.of_dumps(Path(said.benchmark), Path(said.target))
    except DumpError as error:
        return [
            caveat(
                configuration.CONFIGURATION,
                say("a configuration cannot be read: {error}", error=error),
                say("compare the two command lines"),
            )
        ], None
    return ([], None) if found is None else ([found[0]], found[1])


def _first_stage(step: Step) -> Finding | None:
    """The first stage: whatever updates weights comes after it, or within it."""
    names = sorted(step.findings, key=stages.order)
    return step.findings[names[0]] if names else None


def _samples(results: Results, step: Step) -> tuple[GateItem, Shut | None] | None:
    """Prompts and responses among the key data; None where nothing parts there."""
    try:
        left, right = sources.samples(results, step.number)
    except DumpError as error:
        return caveat(
            samples.TOKENS,
            say("prompts and responses cannot be read: {error}", error=error),
            say("save them again"),
        ), None
    if not left or not right:
        return None
    lone, other = left - right, right - left
    if not lone or not other:  # a side may hold more of the same; its rows are counted apart
        return None
    evidence = say(
        "{lone} of the benchmark's {left} samples are not among the target's "
        "{right}: other prompts or responses, token by token",
        lone=lone.total(),
        left=left.total(),
        right=right.total(),
    )
    worst = sorted(other)[0]
    closed = Shut(
        "label_or_mask_shift",
        "token ids",
        stages.LOG_PROB,
        0,
        None,
        worst,
        {},
        {},
        [evidence, say("among them sample {worst} of the target", worst=worst)],
    )
    return shut(
        samples.TOKENS, evidence, say("give both sides the same rollouts; then dump them again")
    ), closed


def _responses(found: Generated, step: Step) -> tuple[GateItem, Shut | None]:
    """What was generated, sample by sample."""
    lone = found.benchmark_only + found.target_only
    if found.first is None and not lone:
        same = say(
            "the responses of {count} samples are the same on both sides", count=found.samples
        )
        return opened(samples.TOKENS, same), None
    parts = []
    if found.samples > found.same:
        parts.append(
            say(
                "{count} of {total} responses differ",
                count=found.samples - found.same,
                total=found.samples,
            )
        )
    if lone:
        parts.append(
            say(
                "{benchmark} samples are on the benchmark only, {target} on the target only",
                benchmark=found.benchmark_only,
                target=found.target_only,
            )
        )
    evidence = joined(parts, SEMICOLON)
    said = [evidence]
    if found.first is not None:
        where, benchmark, target = found.first
        said.append(
            say(
                "first {where}: {benchmark!r} against {target!r}",
                where=where,
                benchmark=benchmark,
                target=target,
            )
        )
    closed = Shut("data", "response", found.stage, 0, None, None, {}, {}, said, step.number)
    return shut(
        samples.TOKENS,
        joined(said, SEMICOLON),
        say(
            "replay the benchmark's rollouts on the target, or compare dumps of what was computed "
            "of the same samples"
        ),
    ), closed


def _rewards(found: Generated, step: Step) -> tuple[list[GateItem], Shut | None]:
    """What samples of equal responses were worth, and whatever else was kept of them."""
    items: list[GateItem] = []
    closed = None
    if found.rewards:
        said = say("of equal responses, {fields}", fields=_fields(found.rewards))
        items.append(
            shut(batch.REWARDS, said, say("find out why the reward of this sample differs"))
        )
        closed = Shut("data", batch.REWARDS, found.stage, 0, None, None, {}, {},
                      [said], step.number)  # fmt: skip
    others = {name: f for name, f in found.fields.items() if name not in found.rewards}
    if others:
        items.append(
            caveat(
                _FIELDS,
                say("of equal responses, {fields}", fields=_fields(others)),
                say(
                    "look at these fields on both sides; numbers that a device computed "
                    "(log-probs) are not held against round-off here"
                ),
            )
        )
    return items, closed


def _fields(found: Mapping[str, tuple[int, str]]) -> Said:
    return listed(
        say("{name} differs in 1 sample (first {first})", name=name, first=first)
        if count == 1
        else say(
            "{name} differs in {count:,} samples (first {first})",
            name=name,
            count=count,
            first=first,
        )
        for name, (count, first) in found.items()
    )


def _tokens(finding: Finding | None) -> tuple[GateItem, Shut | None]:
    """Ids that embeddings were given, in the first stage that was compared."""
    if finding is None:
        return caveat(samples.TOKENS, UNKNOWN, say("dump the stage's inputs")), None
    rows = equipped.ids(finding.stage.rows)
    if rows.is_empty():
        return caveat(samples.TOKENS, *unmeasured.ids(equipped.every_ids(finding.stage.rows))), None
    different = equipped.differing(rows)
    if different.is_empty() and equipped.unknown(rows).height:
        return caveat(
            samples.TOKENS,
            _order_unknown(rows.height),
            say("dump the ids with task tensor to be sure"),
        ), None
    if different.is_empty():
        exact = bool(rows.get_column("error_kind").is_in(
            [measures.DIGEST, measures.TENSOR]).all())  # fmt: skip
        text = say(
            "the ids that {count} embeddings were given are the same on both sides",
            count=rows.height,
        )
        if exact:
            return opened(samples.TOKENS, text), None
        text = say(
            "of the ids that {count} embeddings were given, shapes, largest and "
            "smallest are the same; statistics say no more",
            count=rows.height,
        )
        return caveat(samples.TOKENS, text, say("dump the ids with task tensor to be sure")), None
    row = different.row(0, named=True)
    evidence = say("the ids given to {name} differ", name=row["name"])
    return shut(
        samples.TOKENS, evidence, say("give both sides the same rollouts; then dump them again")
    ), _shut(finding, row, "label_or_mask_shift", "token ids", evidence)


def _order_unknown(count: int) -> Said:
    return say(
        "{unknown}: the xor checksums of {count} records are equal, which are blind to order and "
        "to values that occur in pairs",
        unknown=UNKNOWN,
        count=count,
    )


def _weights(finding: Finding | None) -> tuple[GateItem, Shut | None]:
    """Parameters before the first update, as the forward records of the first stage have them."""
    parameters = None if finding is None else equipped.parameters(finding.stage.rows)
    if finding is None or parameters is None or parameters.is_empty():
        every = None if finding is None else equipped.every_parameter(finding.stage.rows)
        return caveat(weights.ITEM, *unmeasured.parameters(every)), None
    different = equipped.differing(parameters)
    if different.is_empty() and equipped.unknown(parameters).height:
        return caveat(
            weights.ITEM,
            _order_unknown(parameters.height),
            say("dump modules with summary_mode statistics, or with task tensor"),
        ), None
    if different.is_empty():
        return opened(
            weights.ITEM,
            say(
                "{count} recorded parameters agree before the first update", count=parameters.height
            ),
        ), None
    names = different.get_column("name").to_list()
    evidence = say(
        "{count} of {total} recorded parameters differ: {names}",
        count=len(names),
        total=parameters.height,
        names=listed(names),
    )
    row = different.row(0, named=True)
    return shut(weights.ITEM, evidence, say("start both sides from the same checkpoint")), _shut(
        finding, row, "weights", "parameter", evidence
    )


def _shut(
    finding: Finding, row: dict[str, object], cause: str, operator: str, evidence: Said
) -> Shut:
    benchmark, target = (
        {"record": row.get(f"name_{side}"), **{n: row.get(f"{n}_{side}") for n in _SHOWN}}
        for side in ("benchmark", "target")
    )
    module, rank = row.get("module"), row.get("rank")
    return Shut(
        cause,
        operator,
        finding.stage.name,
        rank if isinstance(rank, int) else 0,
        module if isinstance(module, str) and module else None,
        None,
        benchmark,
        target,
        [evidence],
    )


_SHOWN = ("dtype", "shape", "max", "min", "norm")


def _stages(results: Results, step: Step) -> GateItem:
    known = [(name, s) for name in results.stages() if (s := results.summary(TARGET, name))]
    alone = [name for name, summary in known if of_key_data_alone(summary)]
    compared = [name for name, summary in known if summary.compared]
    lacking = [name for name, s in known if not s.compared and name not in alone]
    steps = sorted({n for _, summary in known for n in summary.steps})
    notes = [
        restored(note, summary.messages)
        for _, summary in known
        for note in summary.notes
        if not note.startswith(framework.NOTE)
    ]
    if not compared and not alone:
        return shut(extent.STAGES, say("nothing was compared"), say("see what compare said"))
    if not compared:
        return shut(
            extent.STAGES,
            say(
                "only key data were compared ({names}): nothing says how deep the model is",
                names=listed(alone),
            ),
            say("dump the stage beside them, so that what round-off allows is known"),
        )
    given = {"names": listed(compared), "step": step.number}
    text = (
        say("1 stage ({names}), of which step {step} is judged", **given)
        if len(compared) == 1
        else say(
            "{count} stages ({names}), of which step {step} is judged", count=len(compared), **given
        )
    )
    if alone:
        text += say("; key data alone of {names}", names=listed(alone))
    if lacking:
        text += say("; on one side only or without counterpart: {lacking}", lacking=listed(lacking))
    if len(steps) > 1:
        text += say("; later steps inherit what updates differ by")
    if notes:
        text += SEMICOLON + joined(notes[:3], SEMICOLON)
    if lacking or notes or len(steps) > 1:
        return caveat(
            extent.STAGES, text, say("dump the same stages, steps and ranks on both sides")
        )
    return opened(extent.STAGES, text)


def _frameworks(results: Results) -> list[GateItem]:
    """That the sides were dumped in two frameworks; nothing where they were not, or none says."""
    found = [
        caveat(
            _FRAMEWORK,
            restored(note, summary.messages),
            say(
                "make sure that both begin from the same weights and formats, and that operators "
                "of one name have the same defaults (epsilons, approximations, masks)"
            ),
        )
        for name in results.stages()
        if (summary := results.summary(TARGET, name)) is not None
        for note in summary.notes
        if note.startswith(framework.NOTE)
    ]
    return found[:1]


def _capture(step: Step) -> GateItem:
    kinds: set[str] = set()
    checksums = 0
    for finding in step.findings.values():
        kinds |= set(finding.stage.rows.get_column("error_kind").drop_nulls().unique())
        checksums += equipped.by_checksum(finding.stage.rows).height
    if checksums:
        return caveat(
            extent.CAPTURE,
            say(
                "checksums and no statistics: of {count} records it is known whether they "
                "differ, and never by how much",
                count=f"{checksums:,}",
            ),
            say("dump with summary_mode statistics, or task tensor, which say how much"),
        )
    if kinds and kinds <= {measures.STATISTIC, measures.DIGEST}:
        return caveat(
            extent.CAPTURE,
            say("statistics: errors are known from below only, and a permutation is invisible"),
            say("dump with task tensor where it matters"),
        )
    return opened(
        extent.CAPTURE,
        say(
            "differences are of: {kinds}",
            kinds=joined(sorted(kinds), COMMA) if kinds else say("nothing"),
        ),
    )
