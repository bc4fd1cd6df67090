"""What neither side recorded, and a run of its kind has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.diagnose.gate import lacking
from rlprobe.dumps.key_data import Row
from rlprobe.judge import keydata
from tests.unit.diagnose.stand_ins import evidence, rows, run

CAPTURED = {"capture": {"key_data": True}, "framework": "verl"}
NORMS = {"actor/grad_norm": 1.0, "critic/grad_norm": 1.0}


def update(*left_out: str) -> pl.DataFrame:
    """One record of each kind that an update has, but some."""
    kinds = {
        "results": {"slot": "output", "direction": "forward"},
        "backward": {"slot": "input", "direction": "backward"},
        "gradients": {"slot": "grad_reduced", "direction": "update"},
        "changes": {"slot": "change", "direction": "update", "name": "w.change.0.debug"},
        "losses": {"slot": "loss", "direction": "update"},
    }
    return pl.concat([rows(**kind) for name, kind in kinds.items() if name not in left_out])


def found(table: pl.DataFrame | None = None, stage: str = stages.ACTOR_UPDATE,
          key_data: Any = None, **of_run: Any) -> str:  # fmt: skip
    """What the item says of two runs that lack the same; empty where it says nothing."""
    looked_at = evidence(update() if table is None else table, run(**of_run), run(**of_run),
                         key_data=key_data, stage=stage)  # fmt: skip
    item = lacking.check(looked_at)
    return "" if item is None else item.evidence


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("results", "results of modules of actor_update"),
        ("backward", "gradients within the model of actor_update"),
        ("gradients", "gradients of parameters of actor_update"),
        ("changes", "changes of parameters of actor_update"),
        ("losses", "losses of actor_update"),
    ],
)
def test_an_update_has_every_kind_of_record(kind: str, said: str) -> None:
    assert found() == ""
    assert said in found(update(kind))


def test_a_stage_that_only_scores_has_no_gradients() -> None:
    assert found(rows(), stage=stages.LOG_PROB) == ""
    only_given = rows(slot="input")
    assert "results of modules" in found(only_given, stage=stages.LOG_PROB)
    assert found(only_given, stage=stages.GENERATE) == "", "an engine may have none"


def layer(number: int) -> str:
    return f"model.layers.{number}.mlp"


@pytest.mark.parametrize("stage", [stages.LOG_PROB, stages.ACTOR_UPDATE])
def test_a_layer_whose_parameters_are_there_ran(stage: str) -> None:
    weights = [(f"{layer(n)}.weight", stage, 0, 0) for n in (0, 1)]
    every = pl.concat([update(), *(rows(module=layer(n)) for n in (0, 1))])
    named = every.with_columns(name=pl.lit(f"{layer(0)}.weight.change.0.debug"))
    assert found(named, stage, weights=weights) == ""
    lost = named.filter(pl.col("module") != layer(1))
    assert f"results of layers [1] of {stage}" in found(lost, stage, weights=weights)
    assert found(lost, stage, weights=weights[:1]) == "", "a model of one layer"
    elsewhere = [weights[0], (f"{layer(1)}.weight", stage, 0, 1)]
    assert found(lost, stage, weights=elsewhere) == "", "a rank that is not recorded"
    functions = named.with_columns(module=pl.lit(None, pl.String))
    assert found(functions, stage, weights=weights) == "", "functions alone: no module is known"


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (stages.REFERENCE, "ref_log_prob"),
        (stages.REFERENCE, "ref_log_probs"),
        (stages.LOG_PROB, "old_log_probs"),
        (stages.VALUES, "values"),
        (stages.ACTOR_UPDATE, "advantages"),
        (stages.CRITIC_UPDATE, "given_returns"),
    ],
)
def test_key_data_of_each_stage_are_there(tmp_path: Path, stage: str, name: str) -> None:
    data = tmp_path / "data"
    (data / "prompts" / "step0").mkdir(parents=True)
    own: dict[str, Any] = {"data": data, "declared": CAPTURED, "metrics": NORMS}
    said = found(update(), stage, **own)
    assert "neither side has key data" in said and f"of {stage}" in said
    assert found(update(), stage, data=data) == "", "no key data were asked for"
    (data / name / "step1").mkdir(parents=True)
    assert "key data" in found(update(), stage, **own), "of another step"
    (data / name / "step0").mkdir(parents=True)
    assert found(update(), stage, **own) == ""


@pytest.mark.parametrize("micro_batches", [(0, 1), (0,), (1,)])
def test_a_micro_batch_that_neither_side_has_is_said(
    tmp_path: Path, micro_batches: tuple[int, ...]
) -> None:
    """Key data are joined by sample: what is nowhere is not joined."""
    held = [Row(f"s{n}", np.ones(3), 0, n) for n in micro_batches]
    difference = keydata.compare(held, held, "old_log_probs", 0)
    proof = [{"stage": stages.LOG_PROB, "step": 0, "rank": 0, "samples": ["s0", "s1"]}]

    def side() -> Any:
        made = run(proof=proof)
        samples = frozenset(row.sample for row in held)
        made.recorded = SimpleNamespace(
            samples=lambda name, step: samples, micro_steps=lambda key, step: {}
        )
        return made

    looked_at = evidence(rows(), side(), side(), stage=stages.LOG_PROB,
                         key_data={"old_log_probs": difference})  # fmt: skip
    item = lacking.check(looked_at)
    whole = micro_batches == (0, 1)
    assert (item is None) == whole
    if item is not None:
        assert "old_log_probs of 1 sample of actor_compute_log_prob" in item.evidence


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"update_log_probs": 2}, ""),
        ({"update_log_probs": 4}, "records of 2 of 4 micro-batches of actor_update"),
        ({"actor_grad_norm": 1}, ""),
        ({"actor_grad_norm": 3}, "gradients of 2 of 3 updates of actor_update"),
        ({"critic_grad_norm": 3, "values": 4}, ""),
    ],
)
def test_a_micro_batch_or_update_that_left_key_data_left_records(
    saved: dict[str, int], said: str
) -> None:
    """The second mini-batch of both sides: what is left of it agrees."""
    passes = [rows(micro_batch=n, call=n) for n in range(2)]
    updates = rows(slot="grad_reduced", direction="update", micro_batch=1, call=0)
    kinds = update("results", "gradients").with_columns(micro_batch=pl.lit(0), call=pl.lit(0))
    table = pl.concat([*passes, updates, kinds], how="diagonal_relaxed")
    looked_at = evidence(table, run(), run())
    for side in (looked_at.benchmark, looked_at.target):
        side.recorded = SimpleNamespace(
            keys=list, contradicted=dict,
            micro_steps=lambda key, step: {0: saved[key]} if key in saved else {},
        )  # fmt: skip
    finding = looked_at.step.findings["actor_update"]
    finding.stage.processes = [SimpleNamespace(rank=0, rows=table)]
    item = lacking.check(looked_at)
    text = "" if item is None else item.evidence
    assert said in text and bool(text) == bool(said)


def test_proofs_and_weights_of_every_stage_are_there() -> None:
    entry = {"stage": stages.LOG_PROB, "step": 0, "rank": 0, "samples": []}
    assert "samples of actor_update" in found(proof=[entry])
    assert found(proof=[entry, {**entry, "stage": stages.ACTOR_UPDATE}]) == ""
    other, own = ("w", stages.LOG_PROB, 0, 0), ("w", stages.ACTOR_UPDATE, 0, 0)
    assert "digests of the weights of actor_update" in found(weights=[other])
    assert found(weights=[other, own]) == ""
    assert "digests of w of actor_update" in found(weights=[other, ("v", *own[1:])])


def test_a_trainer_reports_and_clips() -> None:
    assert "metrics of the step" in found(declared={"framework": "verl"})
    assert "a gradient norm of actor_update" in found(
        declared={"framework": "verl"}, metrics={"actor/entropy": 1.0, "critic/grad_norm": 1.0}
    )
    assert found(declared={"framework": "verl"}, metrics=NORMS) == ""
    assert found(declared={"framework": "slime"}, metrics={"train/grad_norm": 1.0}) == ""
    assert found(metrics={}) == "", "no framework's run"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train/grad_norm", ""),
        ("train/grad_norm@1", "gradients of 1 of 2 updates of actor_update"),
        ("train/actor/grad_norm@2", "gradients of 2 of 3 updates of actor_update"),
        ("train/loss@1", ""),
    ],
)
def test_an_update_whose_norm_alone_the_trainer_reports_is_lacking(name: str, said: str) -> None:
    """slime numbers what it reports of a rollout's train steps."""
    table = pl.concat([update(), rows(slot="grad_reduced", direction="update")]).with_columns(
        call=pl.lit(0), micro_batch=pl.lit(0)
    )
    metrics = {"train/grad_norm": 1.0, name: 1.0}
    both = [run(declared={"framework": "slime"}, metrics=metrics) for _ in range(2)]
    looked_at = evidence(table, *both)
    finding = looked_at.step.findings["actor_update"]
    finding.stage.processes = [SimpleNamespace(rank=0, rows=table)]
    item = lacking.check(looked_at)
    text = "" if item is None else item.evidence
    assert said in text and bool(text) == bool(said)
    # with a critic's updates beside it, a norm that does not say whose it is says nothing
    looked_at.step.findings["critic_update"] = finding
    item = lacking.check(looked_at)
    unsaid = item is None or "updates of" not in item.evidence
    assert unsaid == ("actor" not in name)
