"""Why too little was compared, and what to do about it: the text of exit code 4."""

from __future__ import annotations

from collections.abc import Sequence

from rlprobe.compare import lacking, measures
from rlprobe.compare.writer import Summary
from rlprobe.dumps.schema import ROLLOUT
from rlprobe.errors import NotComparableError
from rlprobe.stages import GENERATE
from rlprobe.terminal import counted

#: How the reason of records begins whose whole process has no counterpart.
NO_PROCESS = ("the benchmark has no ", "the target has no ")
#: The same, where the other side has a step of that number, which is another one.
MAPPED_AWAY = "--map-step leaves "


def insufficient(
    summaries: Sequence[Summary], coverage: float, wanted: Sequence[str] = ()
) -> NotComparableError | None:
    """Why the comparison is not one, None when it is.

    Generation on one side only is no lack: a replay does not generate.

    Args:
        summaries: of every stage.
        coverage: share of both sides' records that must have been compared.
        wanted: stages that were asked for by name.
    """
    judged = [
        s
        for s in summaries
        if (s.stage != GENERATE or GENERATE in wanted or all(s.ranks.values()))
        and not (s.joined and not s.counts)
    ]
    if not any(s.compared or s.joined for s in summaries):
        return NotComparableError(_lack("nothing was compared", summaries))
    poor = [
        s
        for s in judged
        if not s.compared or min(map(s.coverage, ("benchmark", "target"))) < coverage
    ]
    if poor:
        share = f"less than {100 * coverage:g} % of the records were compared"
        return NotComparableError(_lack(share, poor))
    return None


def _lack(what: str, summaries: Sequence[Summary]) -> str:
    """What was not compared and why, the commonest reason first, and what to do about it."""
    lines = [what]
    commonest: dict[str, int] = {}
    for s in summaries:
        lines.append(
            f"{s.stage}: benchmark {s.measured['benchmark']} of {s.records['benchmark']}, "
            f"target {s.measured['target']} of {s.records['target']}"
        )
        if s.samples is not None and s.of_key_data_alone:
            lines.append("  it has key data alone, and none of them could be joined")
            lines += [f"  {note}" for note in s.samples["notes"]]
        else:
            lines += [f"the {side} has no record at all" for side in s.ranks if not s.ranks[side]]
        if s.checksums["differ"]:
            lines.append(f"  {checksums(s)}")
        lines += [f"  {line}" for line in lacking.said(s.lacking.items())]
        if not s.compared:  # nothing else says them on the screen
            lines += [f"  note: {note}" for note in s.notes]
        for reason, found in s.lacking.items():
            commonest[reason] = commonest.get(reason, 0) + found.records
    lines.append(_advice(max(commonest, key=commonest.__getitem__, default=""), summaries))
    return "\n  ".join(lines)


_CHECKSUMS_ONLY = (
    "checksums say whether, never how much: dump with summary_mode statistics, or task tensor"
)
#: What to do about the commonest reason.
_ADVICE = {
    lacking.SHAPES: (
        "the two sides were given other batches, lengths or shards: run both on the same "
        "samples with the same micro-batch size and parallel layout"
    ),
    lacking.LAYOUTS: (
        "the two sides lay the same number of elements out otherwise (transposed, flattened, a "
        "dimension of 1 more, or other batches and lengths): switch packing and formats such as "
        "[sequence, batch] alike, or see gradients and key data, which do not depend on it"
    ),
    **dict.fromkeys(
        measures.NONE_THERE.values(),
        "give both sides the same arguments and switches (caches, masks, dropout): what one side "
        "has, the other leaves out",
    ),
    lacking.TYPES: (
        "have both sides give the same type of value: a whole number is not held against a "
        "floating-point one, a truth value or a text"
    ),
    lacking.DTYPES: "run both sides in the same precision, or call the pair --pair high_precision",
    lacking.UNREADABLE: (
        "collect these records again; where a tensor's file is meant, copy the dumps again with "
        "dump_tensor_data"
    ),
    measures.CHECKSUMS_DIFFER: _CHECKSUMS_ONLY,
    measures.XOR_EQUAL: _CHECKSUMS_ONLY,
    measures.CHECKSUMS_UNLIKE: (
        "dump both sides with one summary_mode: statistics, which say how much, or one checksum"
    ),
    **dict.fromkeys(
        measures.NO_STATISTICS.values(),
        "dump with summary_mode statistics; a type that msprobe takes none of, with task tensor",
    ),
}


_OTHER_ROLLOUTS = (
    "compare rollouts of the same prompts and steps, with as many responses to each; summary.json "
    "lists what is on one side only"
)
_KEY_DATA_ALONE = (
    "key data are joined by sample, and nothing names the samples of these: rlprobe's collector "
    "does (key_data_dump); of log-probs, prompts, responses and attention_mask of the same "
    "micro-batches name them"
)
_NOTHING_RECORDED = (
    "a dump without records is what msprobe leaves where nothing ran between start() and stop(), "
    "or where step, rank, scope and list of its configuration leave out what did"
)
#: What records of modules begin with, in PyTorch and MindSpore; others are of functions.
_MODULES = {"Module", "Cell"}
_ONE_KIND = (
    "all that only the {side} has are calls of {what} ({names}): where the other side has none, "
    "dump both at one level ({level} alone); else check that both run the same code"
)
_OTHER_STEPS = (
    "compare steps that both sides have: dump the same ones, or say with --map-step which is which"
)
_OTHER_RANKS = (
    "compare ranks that both sides have: run both with the same parallel layout, or give the "
    "directory of one rank of each (STAGE/stepN/rankR), whatever their numbers"
)


def _advice(reason: str, summaries: Sequence[Summary]) -> str:
    if reason in measures.NO_STATISTICS.values() and any(s.without_tensors for s in summaries):
        return _ADVICE[lacking.UNREADABLE]
    if reason in _ADVICE:
        return _ADVICE[reason]
    if reason.startswith((*NO_PROCESS, MAPPED_AWAY)) and reason not in lacking.NO_SUCH.values():
        return _of_place(reason)
    if all(summary.of_key_data_alone for summary in summaries):
        return _KEY_DATA_ALONE
    if any(not ranks for s in summaries for ranks in s.ranks.values()):
        return _NOTHING_RECORDED
    return _of_kinds(*(
        {name.partition(".")[0] for s in summaries for name in s.unmatched[side]}
        for side in ("benchmark", "target")
    ))  # fmt: skip


def _of_place(reason: str) -> str:
    """What to do where a whole process has no counterpart."""
    if " rank " in reason:
        return _OTHER_RANKS
    return "compare stages that both sides have" if " stage " in reason else _OTHER_STEPS


def _of_kinds(benchmark: set[str], target: set[str]) -> str:
    """What to do about records without counterpart, from the words that their names begin with."""
    names = [", ".join(sorted(kinds)) for kinds in (benchmark, target)]
    modules = [kinds <= _MODULES for kinds in (benchmark, target)]
    functions = [not kinds & _MODULES for kinds in (benchmark, target)]
    if benchmark | target == {ROLLOUT}:
        return _OTHER_ROLLOUTS
    if benchmark and target and not benchmark & target:
        alone = f"only the benchmark has records named {names[0]}, only the target {names[1]}"
        if functions[0] == functions[1]:
            return f"{alone}: name in --rules which are each other's counterparts"
        return f"{alone}: dump both at the same level (L0 modules, L1 functions)"
    if benchmark and target:
        return (
            "check that both sides are the same model, dumped at the same level and with the same "
            "stages; name their differences in --rules; summary.json lists what is unmatched"
        )
    at = 0 if benchmark else 1
    side = ("benchmark", "target")[at]
    if functions[at]:
        return _ONE_KIND.format(
            side=side, what="functions", names=names[at], level="L0 has modules"
        )
    if modules[at]:
        return _ONE_KIND.format(
            side=side, what="modules", names=names[at], level="L1 has functions"
        )
    return (
        f"all that is unmatched only the {side} has ({names[at]}): check that both sides are the "
        "same model, dumped with the same stages, scope and list"
    )


def checksums(summary: Summary) -> str:
    differ, compared = (summary.checksums[name] for name in ("differ", "compared"))
    verb = "differs" if differ == 1 else "differ"
    return f"{differ:,} of {counted(compared, 'checksum')} {verb}"
