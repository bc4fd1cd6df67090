"""Is a benchmark of one rank compared with a target of two, as far as can be?

Through the self-test's pipeline: real replays in one process (see test_inprocess).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from rlprobe.diagnose.diagnosis import CAVEAT, Diagnosis
from rlprobe.diagnose.run import Examined
from rlprobe.selftest import catalogue
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial
from tests.unjudged.copy import Copy

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CASES = """
from rlprobe.selftest import benign, fault

@benign(needs={"target_world_size": 2})
def spread(site):
    yield

@fault(stage="critic_update", cause="hyperparameter", needs={"target_world_size": 2})
def faster(site):
    for group in site.optimizer.param_groups:
        group["lr"] *= 1.02
    yield
    for group in site.optimizer.param_groups:
        group["lr"] /= 1.02

@fault(stage="actor_compute_log_prob", module="lm_head", cause="constant_factor",
       needs={"target_world_size": 2})
def louder(site):
    head = site.model.get_submodule("lm_head")
    hook = head.register_forward_hook(lambda m, args, out: out * 1.001)
    yield
    hook.remove()

@fault(stage="critic_compute_values", module="model.layers.1.mlp", cause="constant_factor",
       needs={"target_world_size": 2})
def deeper(site):
    block = site.model.get_submodule("model.layers.1.mlp")
    hook = block.register_forward_hook(lambda m, args, out: out * 1.01)
    yield
    hook.remove()
"""


@pytest.fixture(scope="module")
def judged(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judged]:
    directory = tmp_path_factory.mktemp("spread")
    (directory / "cases").mkdir()
    (directory / "cases" / "mine.py").write_text(CASES)

    def run(name: str) -> Judged:
        case = catalogue.cases([directory / "cases"], [name])[0]
        return pipeline.judge(Trial(case))

    return run


@pytest.fixture(scope="module")
def judge(judged: Callable[[str], Judged]) -> Callable[[str], Diagnosis]:
    return lambda name: judged(name).diagnosis


def test_gradients_and_changes_are_judged_as_wholes(judge: Callable[[str], Diagnosis]) -> None:
    found = judge("spread")
    assert found.verdict == "aligned", found.sentence
    judged = {stage.stage: stage.records for stage in found.stages}
    # each of 27 parameters' gradient before and after clipping and its change, 28 of the critic;
    # and what modules take and give, forward and backward
    assert judged["actor_update"] >= 3 * 27 + 100 and judged["critic_update"] >= 3 * 28 + 100
    assert judged["actor_compute_log_prob"] > 50
    said = {item.item: item for item in found.gate}
    assert said["coverage"].state == CAVEAT
    assert "spread over another number of ranks" in said["coverage"].evidence
    assert "59 of 59 records of modules that both sides have" in said["coverage"].evidence
    assert "by norm only" not in said["weights"].evidence


def test_a_learning_rate_is_seen_in_the_wholes(judge: Callable[[str], Diagnosis]) -> None:
    found = judge("faster")
    assert found.first is not None, found.sentence
    assert (found.verdict, found.first.stage) == ("diverged", "critic_update")
    assert found.cause is not None and found.cause.known == "observed"
    assert found.cause.class_ == "hyperparameter" and "lr " in found.cause.statement


def test_a_forward_fault_is_located_at_its_module(judge: Callable[[str], Diagnosis]) -> None:
    found = judge("louder")
    assert found.first is not None, found.sentence
    assert (found.verdict, found.first.stage) == ("diverged", "actor_compute_log_prob")
    assert found.first.module == "lm_head" and found.cause is not None
    assert found.first.call is None, "a record of the whole stage is of no call"
    assert found.cause.class_ == "constant_factor", found.cause


def test_a_block_is_located_over_other_ranks(judge: Callable[[str], Diagnosis]) -> None:
    found = judge("deeper")
    assert found.first is not None and found.cause is not None, found.sentence
    assert (found.verdict, found.first.stage) == ("diverged", "critic_compute_values")
    assert found.first.module == "model.layers.1.mlp"
    assert found.cause.class_ == "constant_factor", found.cause


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (pl.lit(False), "no_partner"),
        pytest.param(pl.col("module") == "lm_head", "other_modules", marks=pytest.mark.long),
        (~pl.col("module").str.contains("layers.1"), "other_modules"),
    ],
    ids=["none", "the head alone", "one layer of two"],
)
def test_without_the_records_of_the_whole_it_is_no_agreement(
    judged: Callable[[str], Judged], tmp_path: Path, kept: pl.Expr, reason: str
) -> None:
    copy = Copy(judged("spread").directory, tmp_path)
    names = copy.files("target", "logical/*.parquet")
    assert len(names) == 5
    for name in names:
        copy.table("target", name, lambda table: table.filter(kept))
    found = copy.judged()
    assert isinstance(found, Examined) and found.verdict == "not_comparable"
    item = next(item for item in found.gate.items if item.item == "judged")
    assert item.state == "shut" and reason in item.evidence, item
