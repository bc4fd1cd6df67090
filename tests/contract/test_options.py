"""Every option of precision_collector.yaml on real verl, grouped into few runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rlprobe import stages
from rlprobe.capture.collector import OPTIONS
from rlprobe.rollouts import hdf5
from tests.contract.conftest import RUN
from tests.contract.runs import Runs, Tree
from tests.e2e.expected import EVERYTHING, VENDORS
from tests.e2e.server import Variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe]

ONE_STEP = "trainer.total_training_steps=1"
OURS = {"ref_log_prob", "rollout_log_probs", "token_level_rewards", "advantages", "values"}


def option(*names: str) -> pytest.MarkDecorator:
    """Mark a test as the cell of options."""
    marks = [pytest.mark.cell("option", name, RUN) for name in names]

    def apply(test: Any) -> Any:
        for mark in reversed(marks):
            test = mark(test)
        return test

    return apply  # type: ignore[return-value]


@pytest.fixture(scope="module")
def full(made: Runs) -> Variant:
    """Two steps, the second collected, with everything on."""
    return made.collector("everything", **EVERYTHING, token_range_end=1, step_start=1, step_end=1)


@pytest.fixture(scope="module")
def first_half(made: Runs) -> Variant:
    """Reference and critic, calls of torch's functions (L1)."""
    return made.collector(
        "first-half",
        ONE_STEP,
        msprobe=True,
        reference_dump=True,
        critic_train_dump=True,
        level="L1",
    )


@pytest.fixture(scope="module")
def second_half(made: Runs) -> Variant:
    """The actor, modules and calls (mix), tensors, the second and third generated token."""
    return made.collector(
        "second-half",
        ONE_STEP,
        msprobe=True,
        actor_train_dump=True,
        actor_infer_dump=True,
        level="mix",
        task="tensor",
        token_range_start=1,
        token_range_end=2,
    )


@option("msprobe", "dump_path", "step_start", "step_end")
def test_the_second_step_alone_is_under_dump_path(full: Variant) -> None:
    found = Tree(full.dump).stages()
    assert found.keys() == set(stages.STAGES) - {stages.FORCED, stages.TEACHER}
    assert set.union(*found.values()) == {"step1"}
    assert {path.name for path in full.dump.glob("data/*/step*")} == {"step1"}
    assert [path.name for path in (full.dump / "rollouts").iterdir()] == ["step1.h5"]


@option("memory_dump")
def test_each_stage_has_its_memory(full: Variant) -> None:
    for stage in Tree(full.dump).stages():
        path = full.dump / "memory_snapshot" / stage / "step1/rank0.json"
        for entry in json.loads(path.read_text())["entries"]:
            assert entry["after"]["peak"] >= entry["before"]["resident"] > 100 << 20


@option("configurations_dump")
def test_the_configuration_is_verls_own(full: Variant) -> None:
    found = json.loads((full.dump / "configurations.json").read_text())
    assert found["algorithm"]["adv_estimator"] == "gae"
    assert found["actor_rollout_ref"]["rollout"]["n"] == 2


@option("key_data_dump")
def test_key_data_are_what_verl_computed_with(full: Variant) -> None:
    tree = Tree(full.dump)
    norms = {f"{role}_{norm}" for role in ("actor", "critic")
             for norm in ("grad_norm", "total_grad_norm")}  # fmt: skip
    assert {path.name for path in (full.dump / "data").iterdir()} == VENDORS | OURS | norms
    for name in VENDORS | OURS:
        # the critic's forward takes all eight samples at once
        assert len(tree.key(name, step=1)) == (1 if name == "values" else 4), name
    statistics = json.loads(
        (full.dump / "data/responses/step1/rank0/micro_step0/responses.json").read_text()
    )["data"]
    array = tree.key("responses", step=1)[0]
    assert statistics["shape"] == list(array.shape)
    assert statistics["max"] == array.max()
    assert statistics["norm"] == pytest.approx(np.linalg.norm(array.astype(float)))
    metrics = full_metrics(full)[1]
    # verl reports the mean over mini-batches of the norm before clipping
    assert np.mean(tree.key("actor_grad_norm", step=1)) == pytest.approx(
        metrics["actor/grad_norm"], rel=1e-5
    )
    assert np.mean(tree.key("critic_grad_norm", step=1)) == pytest.approx(
        metrics["critic/grad_norm"], rel=1e-5
    )


def full_metrics(variant: Variant) -> list[dict[str, Any]]:
    """The trainer's metrics; a collector's lie in its dump_path."""
    lines = (variant.dump / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@pytest.mark.contract
@option("reference_dump", "critic_train_dump", "level")
def test_one_half_of_the_switches_dumps_one_half_of_the_stages(first_half: Variant) -> None:
    tree = Tree(first_half.dump)
    assert tree.stages().keys() == {stages.REFERENCE, stages.VALUES, stages.CRITIC_UPDATE}
    assert not (first_half.dump / "data").exists()
    assert not (first_half.dump / "memory_snapshot").exists()
    assert not (first_half.dump / "configurations.json").exists()
    names = tree.records(stages.CRITIC_UPDATE)
    assert not any(name.startswith("Module.") for name in names), "L1 has calls only"
    assert any(name.endswith(".backward") for name in names)
    place = first_half.dump / stages.REFERENCE / "step0/rank0"
    assert json.loads((place / "dump.json").read_text())["level"] == "L1"


@option("actor_train_dump", "actor_infer_dump", "level", "task")
def test_the_other_half_dumps_the_actors(second_half: Variant) -> None:
    tree = Tree(second_half.dump)
    assert tree.stages().keys() == {stages.GENERATE, stages.LOG_PROB, stages.ACTOR_UPDATE}
    names = tree.records(stages.ACTOR_UPDATE)
    assert any(name.startswith("Module.") for name in names)
    assert any(name.startswith("Functional.") for name in names)
    place = second_half.dump / stages.LOG_PROB / "step0/rank0"
    document = json.loads((place / "dump.json").read_text())
    assert (document["task"], document["level"]) == ("tensor", "mix")
    assert len(list((place / "dump_tensor_data").glob("*.pt"))) > 500


@option("token_range_start", "token_range_end")
def test_the_chosen_tokens_of_every_sequence(full: Variant, second_half: Variant) -> None:
    """Eight sequences; the token range counts each one's forwards, the prompt's being 0."""

    def widths(variant: Variant, step: int) -> list[int]:
        data = Tree(variant.dump).records(stages.GENERATE, step=step)
        heads = [r for name, r in data.items() if name.startswith("Module.lm_head.Linear.forward")]
        return [record["input_args"][0]["shape"][1] for record in heads]

    found = widths(full, 1)
    assert len(found) == 16
    assert sum(width > 1 for width in found) == 8, "the prompt's forward is token 0"
    assert widths(second_half, 0) == [1] * 16, "tokens 1 and 2 are one position each"


@pytest.mark.contract
@pytest.mark.cell("engine", "generation: records told apart by sample", RUN)
def test_each_generated_record_has_its_sample(full: Variant) -> None:
    lines = (full.dump / "parts/captured/actor-rank0.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    generated = [entry for entry in entries if entry["stage"] == stages.GENERATE]
    samples = [sample for entry in generated for sample in entry["samples"]]
    recorded = hdf5.read(full.dump / "rollouts/step1.h5").samples
    assert len(generated) == 8
    assert sorted(samples) == sorted(sample.sample_digest for sample in recorded)
    # an entry's records are those of its own prompt: as wide as the prompt is long
    data = Tree(full.dump).records(stages.GENERATE, step=1)
    lengths = {sample.sample_digest: len(_prompt(full, sample.id)) for sample in recorded}
    for number, sample in enumerate(samples):
        first = data[f"Module.lm_head.Linear.forward.{2 * number}"]["input_args"][0]
        assert first["shape"][1] == lengths[sample]


def _prompt(variant: Variant, sample: str) -> np.ndarray[Any, Any]:
    found = hdf5.read(variant.dump / "rollouts/step1.h5")
    row = [s.id for s in found.samples].index(sample)
    prompts, mask = found.tensors["prompts"], found.tensors["attention_mask"]
    assert isinstance(prompts, np.ndarray)
    assert isinstance(mask, np.ndarray)
    return prompts[row][mask[row][: prompts.shape[1]].astype(bool)]


@pytest.mark.cell("off", "no field, null, None, msprobe: False", RUN)
def test_off_leaves_training_bitwise_unchanged(made: Runs) -> None:
    plain = made.bare("off-nothing", "trainer.save_freq=2")
    fields = {
        "null": "+ascend_precision_collector=null",
        "none": "+ascend_precision_collector=None",
    }
    variants = [
        made.bare(f"off-{name}", "trainer.save_freq=2", field) for name, field in fields.items()
    ]
    switched_off = {**EVERYTHING, "msprobe": False}
    variants.append(made.collector("off-switch", "trainer.save_freq=2", **switched_off))
    expected = _checkpoint(plain)
    assert len(expected) > 100
    for variant in variants:
        found = _checkpoint(variant)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected), variant.scratch.name
        assert not list(variant.dump.iterdir())


@pytest.mark.cell("off", "light engine and key data change nothing", RUN)
def test_watching_with_the_light_engine_changes_nothing(made: Runs) -> None:
    plain = made.bare("off-nothing", "trainer.save_freq=2")
    config = made.write("observed", **{**EVERYTHING, "task": "statistics"})
    watched = made.light("observed", config, "trainer.save_freq=2")
    expected, found = _checkpoint(plain), _checkpoint(watched)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert Tree(watched.dump).stages().keys() == set(stages.STAGES) - {
        stages.FORCED,
        stages.TEACHER,
    }


@pytest.mark.contract
@pytest.mark.cell("off", "msprobe at L0 changes gradients, by less than the report says", RUN)
def test_what_msprobe_changes_is_measured(made: Runs) -> None:
    """Adam's first moments after one step are the clipped gradients times one constant."""
    torch = pytest.importorskip("torch")
    saved = (ONE_STEP, "trainer.save_freq=1")
    plain = _checkpoint(made.bare("observer-off", *saved), 1)
    watched = made.collector("observer-on", *saved, msprobe=True, actor_train_dump=True)
    found = _checkpoint(watched, 1)
    moments = [name for name in plain if name.endswith("exp_avg") and name.startswith("actor")]
    assert len(moments) > 20
    errors = [
        float(torch.linalg.vector_norm(found[n] - plain[n]) / torch.linalg.vector_norm(plain[n]))
        for n in moments
        if plain[n].count_nonzero()
    ]
    assert 0.0 < max(errors) < 1e-6, f"OBSERVER in gate/extent.py says 1e-6; found {max(errors)}"


def _checkpoint(variant: Variant, step: int = 2) -> dict[str, Any]:
    """Every tensor that verl saved of models and optimizers, by file and place."""
    torch = pytest.importorskip("torch")
    found: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found[prefix] = local.detach()
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(f"{prefix}/{key}", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                collect(f"{prefix}/{index}", item)

    root = variant.scratch / f"checkpoints/global_step_{step}"
    for path in sorted(root.rglob("*.pt")):
        if path.name.startswith(("model", "optim")):
            # verl pickled it a moment ago, in this test's own run
            collect(str(path.relative_to(root)), torch.load(path, weights_only=False))
    return found


@pytest.mark.cell("option", "errors: each named, before training", RUN)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step_strat": 0}, "step_strat: unknown"),
        ({"level": "L7"}, "level: found 'L7'; accepted: L0, L1, mix"),
        ({"step_start": 2, "step_end": 1}, "step_start: found 2, after step_end 1"),
        ({"task": "nan_check"}, "task: found 'nan_check' on device 'cpu'"),
    ],
)
def test_a_wrong_option_stops_before_training(
    made: Runs, options: dict[str, Any], said: str
) -> None:
    name = f"wrong-{next(iter(options))}"
    variant = made.collector(name, may_fail=True, msprobe=True, **options)
    assert variant.status == 2
    assert said in variant.error
    assert "Training Progress" not in variant.log
    assert not list(variant.dump.iterdir())


@pytest.mark.contract
def test_every_option_has_a_cell(request: pytest.FixtureRequest) -> None:
    session = request.session
    cells = {
        mark.args[1]
        for item in session.items
        for mark in item.iter_markers("cell")
        if mark.args[0] in ("option", "mock")
    }
    if len({item.path for item in session.items}) < 2:
        pytest.skip("needs the whole of tests/contract")
    assert set(OPTIONS) <= cells, set(OPTIONS) - cells
