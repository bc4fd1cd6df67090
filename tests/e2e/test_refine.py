"""Do tensors of the suspects, and of nothing else, sharpen a verdict?

Through the self-test's pipeline: real replays in one process (see test_inprocess).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.errors import ConfigError, DumpError
from rlprobe.refine import decide, refined, region, substitution, suspects
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import plan
from rlprobe.runs.suspects import half, refining
from rlprobe.selftest import catalogue
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Also of a kind that sketches cannot name: a constant vector added, below a projection.
FAULTS = """
from rlprobe.selftest import fault
from rlprobe.faults.patching import output_of

PATH = "model.layers.0.self_attn.v_proj"

@fault(stage="actor_compute_log_prob", module=PATH, cause="layout")
def halves_exchanged(site):
    values = site.model.get_submodule(PATH)
    with output_of(values, lambda y: y.roll(y.shape[-1] // 2, -1)):
        yield

@fault(stage="actor_compute_log_prob", module=PATH, cause="layout")
def two_places(site):
    values = site.model.get_submodule(PATH)
    head = site.model.get_submodule("lm_head")
    with output_of(values, lambda y: y.roll(y.shape[-1] // 2, -1)):
        with output_of(head, lambda y: y * 1.01):
            yield

@fault(stage="actor_compute_log_prob", module="model.layers.1.mlp.down_proj", cause="unknown")
def past_the_dispatcher(site):
    import numpy as np

    def kernel(y):
        memory = y.detach().numpy()  # no operator of torch's sees what is written there
        memory += 1e-2 * np.cos(40 * memory)
        return y

    with output_of(site.model.get_submodule("model.layers.1.mlp.down_proj"), kernel):
        yield

@fault(stage="critic_update", cause="optimizer")
def faster(site):
    for group in site.optimizer.param_groups:
        group["lr"] *= 1.5
    yield
    for group in site.optimizer.param_groups:
        group["lr"] /= 1.5
"""
MODULE = "model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def judge(
    pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Judged, Pipeline, Trial]]:
    directory = tmp_path_factory.mktemp("refine")
    (directory / "faults").mkdir()
    (directory / "faults" / "mine.py").write_text(FAULTS)

    def run(name: str) -> tuple[Judged, Pipeline, Trial]:
        trial = Trial(catalogue.cases([directory / "faults"], [name])[0])
        return pipeline.judge(trial), pipeline, trial

    return run


@pytest.fixture(scope="module")
def sharper(
    judge: Callable[[str], tuple[Judged, Pipeline, Trial]], servers: ForkServers
) -> tuple[Judged, Suspects, refined.Refined, list[Run], Pipeline, Trial]:
    judged, pipeline, trial = judge("halves_exchanged")
    found_out = suspects.find(judged.directory, 64)
    suspects.write(judged.directory, found_out)
    assert found_out.suspects is not None
    specs = refining(pipeline._jobs(trial).alignment, found_out.suspects)
    store = pipeline._store.absolute()
    sides = [
        Run.open(store, launch(spec, store, start=servers).parent.name) for spec in specs.values()
    ]
    found = refined.refine(suspects.read(judged.directory), found_out.suspects, *sides)
    refined.write(judged.directory, found)
    return judged, found_out.suspects, found, sides, pipeline, trial


def test_only_the_suspects_are_kept(sharper: Any) -> None:
    _, wanted, refined_, sides, _, _ = sharper
    assert MODULE in wanted.modules and len(wanted.modules) <= 12
    assert wanted.micro_steps == (0,) and len(wanted.samples) == 2
    for run in sides:
        captured = [n for n, found in run.manifest.stages.items() if found.state == "captured"]
        assert captured == ["actor_compute_log_prob"]
        table = pl.read_parquet(run.records("actor_compute_log_prob"))
        kept = table.filter(pl.col("data_name").is_not_null())
        assert set(kept.get_column("module")) <= set(wanted.modules)
        assert set(kept.get_column("call")) == {0}
        # other micro-batches keep their statistics
        assert table.get_column("call").n_unique() > 1
    assert refined_.left_out == 0
    assert 0 < refined_.bytes < 64 << 20


def test_tensors_name_what_sketches_could_only_suspect(sharper: Any) -> None:
    judged, _, found, _, _, _ = sharper
    before: Diagnosis = judged.diagnosis
    after = decide.sharpened(judged.directory, before)
    assert found.repeated, "capture has no effect: the same numbers as in the diagnosed runs"
    assert before.cause is not None and after.cause is not None
    assert after.cause.class_ == "layout"
    assert after.cause.known == "observed", after.cause
    assert "32 of 32 channels stand in other places: moved round by 16" in after.cause.evidence[-1]
    assert after.first == before.first and after.gate == before.gate


@pytest.mark.parametrize(
    ("name", "after"),
    [("halves_exchanged", None), pytest.param("two_places", "lm_head", marks=pytest.mark.long)],
)
def test_the_benchmarks_outputs_in_its_place_show_whether_it_is_all(
    judge: Callable[[str], tuple[Judged, Pipeline, Trial]], name: str, after: str | None
) -> None:
    judged, pipeline, trial = judge(name)
    found = pipeline.refine(trial, judged).diagnosis
    told = substitution.read(judged.directory)
    assert told is not None and told.module == MODULE and told.calls > 1 and not told.failed
    assert (told.agrees, told.next_module) == (after is None, after), told
    assert found.cause is not None and told.said in found.cause.evidence
    # both are the output of a Linear: it may be the same difference once more
    again = f"parts again at {after}, a Linear as well: the same difference once more, or a second"
    assert (again in found.sentence) == (after is not None)
    assert "There is a second difference" not in found.sentence


def test_a_budget_that_is_too_small_says_so(sharper: Any) -> None:
    judged, wanted, _, sides, _, _ = sharper
    written = suspects.read(judged.directory)
    other = Suspects(**{**vars(wanted), "rank": 7})
    with pytest.raises(DumpError, match=r"kept on 0 of 2 sides.*raise --budget-mib"):
        refined.refine(written, other, *sides)


def test_a_refinement_of_other_runs_changes_nothing(sharper: Any) -> None:
    judged, _, found, _, _, _ = sharper
    assert decide.sharpen(judged.diagnosis, found, ("a", "b")) is judged.diagnosis


def test_of_an_imported_benchmark_the_other_site_makes_its_half(sharper: Any) -> None:
    judged, wanted, _, sides, pipeline, trial = sharper
    there = pipeline._jobs(trial).alignment
    origin = plan(there)["benchmark"].key
    benchmark = there.benchmark.model_copy(update={"run": origin})
    controls = there.controls.model_copy(update={"repeat": False})
    here = there.model_copy(update={"benchmark": benchmark, "controls": controls})
    assert list(refining(here, wanted)) == ["target"]
    # the command that goes there asks for the run that is made anyway, and that is found back here
    asked = suspects.shared(
        suspects.read(judged.directory), Path("a.yaml"), judged.directory, Path("store")
    )
    words = shlex.split(asked.elsewhere)
    told = suspects.half(words[words.index("--suspects") + 1])
    assert told.suspects == wanted and told.benchmark == origin
    assert half(there, told.suspects, told.benchmark).key == sides[0].key
    kept = suspects.kept_elsewhere(pipeline._store.absolute(), asked)
    assert kept is not None and kept.key == sides[0].key
    with pytest.raises(ConfigError, match="imported here too"):
        half(here, wanted, origin)
    with pytest.raises(ConfigError, match="and the refinement is of abababababab"):
        half(there, wanted, "ab" * 32)


def test_the_control_of_an_fp32_benchmark_computes_in_fp64(
    sharper: Any, servers: ForkServers
) -> None:
    _, _, _, _, pipeline, trial = sharper
    alignment = pipeline._jobs(trial).alignment
    controls = alignment.controls.model_copy(update={"high_precision": True})
    specs = plan(alignment.model_copy(update={"controls": controls}), environ={})
    assert specs["high_precision"].precision == "fp64"
    store = pipeline._store.absolute()
    key = launch(specs["high_precision"], store, start=servers).parent.name
    table = pl.read_parquet(Run.open(store, key).records("actor_compute_log_prob"))
    made = table.filter((pl.col("slot") == "output") & pl.col("dtype").str.contains("float"))
    assert made.height > 50
    # norms, softmax and rotary angles too, which models compute "in fp32 at least"
    assert set(made.get_column("dtype")) == {"torch.float64"}
    plain = pl.read_parquet(
        Run.open(store, specs["benchmark"].key).records("actor_compute_log_prob")
    )
    both = made.join(plain, on=["step", "rank", "name"], suffix="_fp32")
    off = (both.get_column("norm") / both.get_column("norm_fp32") - 1).abs()
    assert both.height == made.height
    assert 0 < float(off.max()) < 1e-5  # type: ignore[arg-type]


def test_another_learning_rate_is_observed_in_the_update(judge: Any) -> None:
    judged, pipeline, trial = judge("faster")
    found = suspects.find(judged.directory, 64)
    assert found.suspects is not None and found.suspects.trace == "update"
    cause = pipeline.refine(trial, judged).diagnosis.cause
    assert cause is not None and (cause.class_, cause.known) == ("hyperparameter", "observed")
    assert cause.statement.startswith("lr ") and "in group 0 of the optimizer" in cause.statement


@pytest.mark.long
def test_what_no_operator_shows_is_placed_between_blocks(judge: Any) -> None:
    judged, pipeline, trial = judge("past_the_dispatcher")
    found = pipeline.refine(trial, judged).diagnosis
    assert found.cause is not None and found.cause.known == "unknown", found.cause
    assert found.sentence.endswith("The difference is made inside model.layers.1."), found.sentence
    where = region.read(judged.directory)
    assert where is not None and where.beyond == ["model.layers.1"]
    # the layers before and behind it, given the benchmark's numbers, make the benchmark's
    others = [b for b in where.blocks if b.module != "model.layers.1"]
    assert len(others) > 3 and all(b.floor and b.error <= b.floor for b in others)
    assert where.said in found.cause.evidence


def test_the_command_refuses_an_empty_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refine", "--config", "config/config.yaml", "--budget-mib", "0"]) == 2
    assert "--budget-mib is at least 1" in capsys.readouterr().err
