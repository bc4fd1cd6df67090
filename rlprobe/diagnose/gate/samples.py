"""Tokens and mock proof: both sides trained on the same samples."""

from __future__ import annotations

from collections import Counter

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.dumps.proof import Entry
from rlprobe.errors import ReplayError
from rlprobe.judge import replicas
from rlprobe.said import listed, say

TOKENS, PROOF = "tokens", "mock proof"


def check(evidence: Evidence) -> tuple[list[GateItem], Shut | None]:
    """Items ``mock proof`` and ``tokens``."""
    step = evidence.step.number
    proofs = {
        side: [row for row in run.mock_proof() or [] if row["step"] == step]
        for side, run in (("benchmark", evidence.benchmark), ("target", evidence.target))
    }
    if not proofs["target"]:
        item = shut(
            PROOF,
            say(
                "the target left no record of the samples it trained on, so nothing shows "
                "that the rollouts were replayed"
            ),
            say("run the target with capture.provenance on, or import a run that has a mock proof"),
        )
        return [item], None
    items = [_replayed(evidence, proofs["target"])]
    if not proofs["benchmark"]:
        items.append(
            shut(
                TOKENS,
                say("the benchmark left no record of the samples it trained on"),
                say("collect the benchmark again with capture.provenance on"),
            )
        )
        return items, None
    item, found = _tokens(evidence, proofs)
    return [*items, item], found


def _replayed(evidence: Evidence, proof: list[Entry]) -> GateItem:
    """The target's samples against what the benchmark generated."""
    if evidence.benchmark.key not in evidence.target.manifest.parents:
        return caveat(
            PROOF,
            say(
                "the target does not say that it replayed this benchmark's rollouts ({key})",
                key=evidence.benchmark.key[:12],
            ),
            say("compare a target that was run with role target against this benchmark"),
        )
    try:
        generated = evidence.benchmark.generated(evidence.step.number)
    except ReplayError as error:
        return shut(
            PROOF,
            say("the benchmark's rollouts cannot be read: {error}", error=error),
            say("import them again"),
        )
    if generated is None:
        return caveat(
            PROOF,
            say(
                "the benchmark's rollouts of this step are not in the store; both sides' "
                "own proofs are compared instead"
            ),
            say("keep the rollouts when exporting the benchmark run"),
        )
    recorded = {sample.sample_digest for sample in generated.samples}
    trained = {str(s) for row in proof for s in row["samples"]}
    strange = trained - recorded
    if strange:
        return shut(
            PROOF,
            say(
                "{count} of {total} samples that the target trained on are not among the "
                "{recorded} recorded ones",
                count=len(strange),
                total=len(trained),
                recorded=len(recorded),
            ),
            say(
                "replay the benchmark's rollouts; check the tokenizer and the truncation of prompts"
            ),
        )
    return opened(
        PROOF,
        say(
            "the target trained on {count} of the {total} recorded samples, in {stages} stages",
            count=len(trained),
            total=len(recorded),
            stages=len({str(row["stage"]) for row in proof}),
        ),
    )


def _tokens(evidence: Evidence, proofs: dict[str, list[Entry]]) -> tuple[GateItem, Shut | None]:
    order = {name: position for position, name in enumerate(stages.STAGES)}
    names = sorted(
        {str(row["stage"]) for row in proofs["target"]}, key=lambda name: order.get(name, 99)
    )
    compared = 0
    kept: list[str] = []
    reordered: list[str] = []
    for stage in names:
        left, right = _both(evidence, proofs, stage)
        if not left:
            continue
        compared += 1
        only_left, only_right = Counter(left) - Counter(right), Counter(right) - Counter(left)
        if only_left or only_right:
            worst = sorted(only_right or only_left)[0]
            said = say(
                "{stage}: {count} of {total} samples of the target are not the "
                "benchmark's, {missing} of the benchmark's are missing",
                stage=stage,
                count=sum(only_right.values()),
                total=len(right),
                missing=sum(only_left.values()),
            )
            found = Shut(
                "data", TOKENS, stage, 0, None, worst,
                {"samples": len(left)}, {"samples": len(right)}, [said],
            )  # fmt: skip
            return shut(
                TOKENS, said, say("find out which prompts or responses were changed")
            ), found
        (kept if left == right else reordered).append(stage)
    if not compared:
        return shut(
            TOKENS, say("no stage has samples on both sides"), say("capture the same stages")
        ), None
    said = say(
        "the same samples, token by token, in {compared} stages: {names}",
        compared=compared,
        names=listed(names, 6),
    )
    if reordered and kept:
        # A trainer that shuffles does so before all stages; here one stage has its own order.
        why = say(
            "{reordered}: rows stand in another order than on the benchmark, although "
            "they stand in the same in {kept}",
            reordered=reordered[0],
            kept=listed(kept),
        )
        found = Shut("row_order", TOKENS, reordered[0], 0, None, None, {}, {}, [why])
        return shut(
            TOKENS,
            why,
            say("find out what reorders the batch of this stage (balancing, regrouping)"),
        ), found
    if reordered and all(_is_laid_out(evidence, stage) for stage in reordered):
        return opened(
            TOKENS,
            say(
                "{said}; rows stand in another order in {reordered}, on which records of whole "
                "stages do not depend",
                said=said,
                reordered=listed(reordered, 6),
            ),
        ), None
    if reordered:
        return caveat(
            TOKENS,
            say(
                "{said}; rows stand in another order in {reordered}",
                said=said,
                reordered=listed(reordered, 6),
            ),
            say(
                "records of whole micro-batches were not judged there, only gradients, "
                "changes and key data joined by sample; keep the order (balance_batch, "
                "shuffling) to see where a difference begins"
            ),
        ), None
    return opened(TOKENS, said), None


def _is_laid_out(evidence: Evidence, stage: str) -> bool:
    """Whether a stage was judged by records of all its calls (:mod:`rlprobe.judge.logical`)."""
    finding = evidence.step.findings.get(stage)
    return finding is not None and finding.stage.laid_out is not None


def _both(
    evidence: Evidence, proofs: dict[str, list[Entry]], stage: str
) -> tuple[list[str], list[str]]:
    """Each side's samples; those of one replica where models are divided among other ranks."""
    runs = {"benchmark": evidence.benchmark, "target": evidence.target}
    held = {side: replicas.most(run, stage) for side, run in runs.items()}
    if len(set(held.values())) > 1:
        proofs = {
            side: replicas.first(
                (row for row in proofs[side] if row["stage"] == stage),
                lambda row: row["rank"],
                replicas.data_ranks(run, stage),
            )
            for side, run in runs.items()
        }
    return _samples(proofs["benchmark"], stage), _samples(proofs["target"], stage)


def _samples(proof: list[Entry], stage: str) -> list[str]:
    return [str(sample) for row in proof if row["stage"] == stage for sample in row["samples"]]
