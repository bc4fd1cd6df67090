"""Are an engine's weights its trainer's, however it fuses and divides them; and if not, why?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import polars as pl
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from rlprobe import stages
from rlprobe.capture import weights as captured
from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import engine_weights as gate
from rlprobe.diagnose.gate.evidence import Evidence, Shut
from rlprobe.judge import engine_weights
from rlprobe.judge.engine_weights import HALF, OTHER, ROUNDED, SPLIT, STALE, Sync
from rlprobe.report import side_by_side
from rlprobe.store.parts import WEIGHTS
from rlprobe.store.read import Run
from tests.unit.engine_layers_stand_ins import (
    adapters,
    engine,
    trained,
    trainer,
    with_adapters,
)
from tests.unit.train_infer_dumps import Batch, save
from tests.unit.train_infer_dumps import engine as served
from tests.unit.train_infer_runs import GENERATE, PROMPTS, train

#: A division: ranks, whether experts are dealt out whole, rows added to each, and heads of keys.
DIVISIONS = [(1, False, 0, 2), (2, False, 0, 2), (2, True, 0, 2), (4, False, 0, 2),
             (2, False, 4, 2), (2, True, 4, 1)]  # fmt: skip
ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.0.moe.experts"


class Steps:
    """A run of which nothing but its weights is there."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def entered(self, step: int, stage: str, rank: int, model: nn.Module) -> None:
        common = {"step": step, "stage": stage, "role": "r", "rank": rank}
        self.rows += [{**common, **record} for record in captured.describe([model], True)]

    @property
    def manifest(self) -> SimpleNamespace:
        return SimpleNamespace(stages={str(row["stage"]): None for row in self.rows})

    def weights(self) -> pl.DataFrame:
        lines = [
            {**row, "offset": None if row["offset"] is None else json.dumps(row["offset"])}
            for row in self.rows
        ]
        return pl.DataFrame(lines, schema=WEIGHTS)

    def found(self) -> list[Sync]:
        return engine_weights.of_run(cast(Run, self))


def run(
    before: dict[str, Tensor], after: dict[str, Tensor], has: Iterable[dict[str, Tensor]],
    division: tuple[int, bool, int, int] = (1, False, 0, 2), stage: str = stages.GENERATE,
) -> list[Sync]:  # fmt: skip
    """Two steps: the trainer's weights at each, and what the engine has of them."""
    size, by_expert, pad, _ = division
    steps = Steps()
    for step, (own, sent) in enumerate(zip((before, after), has, strict=True)):
        for rank in range(size):
            steps.entered(step, stage, rank, engine(sent, rank, size, by_expert=by_expert, pad=pad))
        steps.entered(step, stages.LOG_PROB, 0, trainer(own))
    return steps.found()


@pytest.mark.parametrize("stage", stages.ENGINE_STAGES)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_equal_weights_are_equal_however_they_are_divided(
    division: tuple[int, bool, int, int], stage: str
) -> None:
    before, after = trained(0, division[3]), trained(1, division[3])
    for found in run(before, after, (before, after), division, stage):
        assert found.kind is None and found.left == (), found
        assert found.compared == len(before)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("name", sorted(trained()))
def test_one_wrong_number_of_any_weight_is_seen(
    name: str, division: tuple[int, bool, int, int]
) -> None:
    before, after = trained(0, division[3]), trained(1, division[3])
    changed = {**after, name: after[name].clone()}
    changed[name].view(-1)[-1] += 0.5
    first, second = run(before, after, (before, changed), division)
    assert first.kind is None
    assert [one.name for one in second.wrong] == [name]


def some(values: dict[str, Tensor], part: str) -> list[str]:
    return [name for name in values if part in name]


def test_what_is_the_matter_is_named() -> None:
    before, after = trained(0), trained(1)
    after |= {name: before[name] for name in some(before, "norm")}  # a frozen one
    moved = len(after) - 1

    def second(has: dict[str, Tensor]) -> Sync:
        return run(before, after, (before, has))[1]

    old = second(before)
    assert old.kind == STALE and len(old.wrong) == old.moved == moved

    half = second({**after, **{name: before[name] for name in some(after, "mlp")}})
    assert half.kind == HALF and half.moved == moved
    assert {one.name for one in half.wrong} == set(some(after, "mlp"))

    experts = {name: after[name].roll(1, 0) for name in some(after, "moe")}
    assert second({**after, **experts}).kind == SPLIT
    heads = {f"{ATTENTION}.q_proj.weight": after[f"{ATTENTION}.q_proj.weight"].roll(4, 0)}
    assert second({**after, **heads}).kind == SPLIT

    for dtype, said in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        short = {name: after[name].to(dtype).float() for name in some(after, "moe")}
        found = second({**after, **short})
        assert found.kind == ROUNDED and {one.rounded for one in found.wrong} == {said}

    assert second({**after, **{n: after[n] * 1.01 for n in some(after, "mlp")}}).kind == OTHER
    mixed = {**after, **heads, **{n: before[n] for n in some(after, "mlp")}}
    assert second(mixed).kind == OTHER


def test_the_first_step_has_no_step_before() -> None:
    before, other = trained(0), trained(5)
    first, _ = run(before, before, (other, before))
    assert first.kind == OTHER and first.moved is None


def test_one_stale_replica_of_two_is_seen() -> None:
    before, after = trained(0), trained(1)
    steps = Steps()
    for step, own in enumerate((before, after)):
        for rank in range(4):  # two replicas of two tensor-parallel ranks
            has = before if rank >= 2 else own
            steps.entered(step, stages.GENERATE, rank, engine(has, rank % 2, 2))
        steps.entered(step, stages.LOG_PROB, 0, trainer(own))
    first, second = steps.found()
    # what is not divided is looked at as well
    assert first.kind is None and second.kind == STALE
    assert "model.norm.weight" in {one.name for one in second.wrong}


def test_what_an_engine_keeps_in_fewer_bits_is_rounded_once_and_no_more() -> None:
    own = trained(0)
    short = {name: value.bfloat16() for name, value in own.items()}
    twice = {**short, EXPERTS + ".down_proj": own[EXPERTS + ".down_proj"].bfloat16() * 1.03}
    steps = Steps()
    steps.entered(0, stages.GENERATE, 0, engine(short))
    steps.entered(0, stages.LOG_PROB, 0, trainer(own))
    steps.entered(1, stages.GENERATE, 0, engine(twice))
    steps.entered(1, stages.LOG_PROB, 0, trainer(own))
    first, second = steps.found()
    assert first.kind is None and first.compared == len(own)
    assert [one.name for one in second.wrong] == [EXPERTS + ".down_proj"]


def test_quantised_weights_are_named_and_not_compared() -> None:
    own = trained(0)
    model = engine(own)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    layer._parameters["weight"] = nn.Parameter(
        torch.zeros(16, 12, dtype=torch.int8), requires_grad=False
    )
    steps = Steps()
    steps.entered(0, stages.GENERATE, 0, model)
    steps.entered(0, stages.LOG_PROB, 0, trainer(own))
    (found,) = steps.found()
    assert found.left == ("model.layers.0.mlp.down_proj.weight",)
    assert found.kind is None and found.compared == len(own) - 1


def test_what_has_an_adapter_may_have_it_merged_and_is_not_compared() -> None:
    own = trained(0)
    query = f"{ATTENTION}.q_proj"
    adapter = {f"{query}.lora_A.default.weight": torch.ones(2, 16),
               f"{query}.lora_B.default.weight": torch.ones(16, 2)}  # fmt: skip
    merged = {**own, f"{query}.weight": own[f"{query}.weight"] + 2.0}
    steps = Steps()
    steps.entered(0, stages.GENERATE, 0, engine(merged))
    steps.entered(0, stages.LOG_PROB, 0, trainer({**own, **adapter}))
    (found,) = steps.found()
    assert found.kind is None and set(found.left) == {f"{query}.weight", f"{query}.bias"}
    assert found.compared == len(own) - 2


#: Ranks, and heads of keys.
SPREAD = [(1, 2), (2, 2), (4, 2), (2, 1)]


def adapted(
    has: list[dict[str, Tensor]], size: int = 1, kv_heads: int = 2, base: int = 0, **kwargs: Any
) -> list[Sync]:
    """Two steps of frozen weights and adapters that are trained; the engine has ``has``."""
    steps = Steps()
    for step, sent in enumerate(has):
        for rank in range(size):
            served = engine(trained(base, kv_heads), rank, size)
            steps.entered(step, stages.GENERATE, rank,
                          with_adapters(served, sent, rank, size, **kwargs))  # fmt: skip
        own = {**trained(0, kv_heads), **adapters(step, kv_heads=kv_heads)}
        steps.entered(step, stages.LOG_PROB, 0, trainer(own))
    return steps.found()


@pytest.mark.parametrize(("size", "kv_heads"), SPREAD)
@pytest.mark.parametrize(("slots", "alpha"), [(1, 6.0), (2, 6.0), (1, 5.0), (1, 0.3)])
def test_adapters_that_an_engine_has_apart_are_the_trainers(
    size: int, kv_heads: int, slots: int, alpha: float
) -> None:
    own = [adapters(step, kv_heads=kv_heads) for step in (0, 1)]
    for found in adapted(own, size, kv_heads, slots=slots, alpha=alpha):
        assert found.kind is None and found.left == (), found
        # the base's too: nothing is merged into it
        assert found.compared == len(trained()) + len(own[0])


@pytest.mark.parametrize(("size", "kv_heads"), SPREAD)
@pytest.mark.parametrize("name", sorted(adapters()))
def test_one_wrong_number_of_any_adapter_is_seen(name: str, size: int, kv_heads: int) -> None:
    own = [adapters(step, kv_heads=kv_heads) for step in (0, 1)]
    own[1][name] = own[1][name].clone()
    own[1][name].view(-1)[-1] += 0.5
    first, second = adapted(own, size, kv_heads)
    assert first.kind is None
    assert [one.name for one in second.wrong] == [name]


def test_what_is_the_matter_with_adapters_is_named() -> None:
    first, second = adapters(0), adapters(1)
    assert adapted([first, first])[1].kind == STALE
    half = {**second, **{name: first[name] for name in some(second, "mlp")}}
    assert adapted([first, half])[1].kind == HALF
    # merged or trained further, the base is another
    assert adapted([first, second], base=5)[1].kind == OTHER
    # an engine that lost them: A and B are zero
    gone = adapted([{name: torch.zeros_like(value) for name, value in first.items()}] * 2, most=3)
    assert len(gone[0].wrong) == len(first)


def test_adapters_of_another_rank_and_several_are_said_and_not_compared() -> None:
    count, own = len(trained()), adapters(0)
    other = adapted([adapters(0, rank=2)])[0]
    assert other.kind is None and set(other.left) == set(own) and other.compared == count
    served = with_adapters(engine(trained(0)), own, slots=2)
    served.lora_manager.lora_index_to_id = [7, 123]  # type: ignore[union-attr]
    steps = Steps()
    steps.entered(0, stages.GENERATE, 0, served)
    steps.entered(0, stages.LOG_PROB, 0, trainer({**trained(0), **own}))
    (found,) = steps.found()
    # whether they are merged is not known
    assert found.kind is None and found.compared == count - len(some(trained(), "_proj."))


def test_an_adapters_factor_that_is_not_known_leaves_b_uncompared() -> None:
    own = adapters(0)
    served = with_adapters(engine(trained(0)), own)
    served.lora_manager._registered_adapters = {}  # type: ignore[union-attr]
    steps = Steps()
    steps.entered(0, stages.GENERATE, 0, served)
    steps.entered(0, stages.LOG_PROB, 0, trainer({**trained(0), **own}))
    (found,) = steps.found()
    assert found.kind is None and set(found.left) == set(some(own, ".lora_B."))
    assert found.compared == len(trained()) + len(some(own, ".lora_A."))


def test_a_run_without_an_engine_says_nothing() -> None:
    steps = Steps()
    steps.entered(0, stages.LOG_PROB, 0, trainer(trained(0)))
    assert steps.found() == []


def test_the_command_says_it_beside_what_the_layers_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = trained(0), trained(1)
    half = {**after, **{name: before[name] for name in some(after, "mlp")}}
    steps = Steps()
    for step, (own, sent) in enumerate(((before, before), (after, half))):
        steps.entered(step, stages.GENERATE, 0, engine(sent))
        steps.entered(step, stages.LOG_PROB, 0, trainer(own))
    run = tmp_path / "run"
    train(run, "padded")
    save(run / GENERATE / "step0/rank0", served(Batch(PROMPTS, {}), 0))
    lines = run / "side/parts/weights/r-rank0.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_text("".join(json.dumps(row) + "\n" for row in steps.rows))
    assert main(["compare", "--train-infer", str(run), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    count = len(before)
    assert f"step 0: all {count} weights of the engine that have a counterpart" in said
    assert (
        f"step 1: 3 of the {count} weights that the trainer has changed are in the engine" in said
    )
    assert "model.layers.0.mlp.gate_proj.weight" in said and "prefill: " in said


def test_names_that_meet_nowhere_are_said_and_no_agreement() -> None:
    own = trained(0)
    steps = Steps()
    steps.entered(0, stages.GENERATE, 0, nn.ModuleDict({"language_model": engine(own)}))
    steps.entered(0, stages.LOG_PROB, 0, trainer(own))
    (found,) = steps.found()
    assert found.kind is None and found.compared == 0
    said = engine_weights.line(found)
    assert f"none of the engine's {len(own)} weights is called as one of the trainer's" in said
    assert "not known" in said
    evidence = cast(Evidence, SimpleNamespace(benchmark=steps, target=Steps()))
    item, lone = gate.check(evidence)
    assert lone is None
    assert item is not None and item.state == "caveat" and "not known" in item.action


def two_steps(
    has: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]], stage: str
) -> Steps:
    """A run whose engine has at the second step what ``has`` makes of both steps' weights."""
    before, after = trained(0), trained(1)
    steps = Steps()
    for step, (own, sent) in enumerate(((before, before), (after, has(before, after)))):
        steps.entered(step, stage, 0, engine(sent))
        steps.entered(step, stages.LOG_PROB, 0, trainer(own))
    return steps


def judged(benchmark: Steps, target: Steps) -> tuple[GateItem | None, Shut | None]:
    return gate.check(cast(Evidence, SimpleNamespace(benchmark=benchmark, target=target)))


def one_kept(name: str) -> Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]:
    return lambda before, after: {**after, name: before[name]}


def test_the_gate_says_what_is_the_matter_and_generation_shuts_nothing() -> None:
    before = trained(0)
    steps = two_steps(lambda before, after: before, stages.GENERATE)
    item, lone = judged(steps, Steps())
    assert lone is None
    assert item is not None and item.state == "caveat"
    assert item.evidence.startswith(
        "benchmark, step 1: the engine has the weights of the captured step before"
    )
    fine = Steps()
    fine.entered(0, stages.FORCED, 0, engine(before))
    fine.entered(0, stages.LOG_PROB, 0, trainer(before))
    item, lone = judged(fine, fine)
    assert lone is None
    count = len(before)
    assert item is not None and item.state == "open"
    assert f"target: all {count} weights of the engine are the trainer's, step 0" in item.evidence
    assert judged(Steps(), Steps()) == (None, None)


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("has", "cause", "module"),
    [
        (lambda before, after: before, "stale_weights", None),
        (one_kept(NORM), "stale_weights", NORM.rpartition(".")[0]),
        (one_kept(QUERY), "stale_weights", QUERY.rpartition(".")[0]),
        (lambda _, after: {n: v.bfloat16().float() for n, v in after.items()}, "weights", None),
        (lambda _, after: {**after, QUERY: after[QUERY] * 1.01}, "weights",
         QUERY.rpartition(".")[0]),
    ],
    ids=["all are stale", "a norm is stale", "a projection is stale", "rounded", "another"],
)  # fmt: skip
def test_a_later_steps_engine_of_the_target_alone_shuts_the_gate(
    has: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]],
    cause: str,
    module: str | None,
) -> None:
    right, wrong = two_steps(lambda _, after: after, stages.FORCED), two_steps(has, stages.FORCED)
    item, lone = judged(right, wrong)
    assert item is not None and item.state == "shut"
    assert lone is not None and (lone.cause, lone.module, lone.step) == (cause, module, 1)
    assert lone.stage == stages.FORCED
    assert "target, step 1: " in lone.evidence[0] and "benchmark's engine has" in lone.evidence[1]


def test_an_engine_that_is_wrong_on_the_benchmark_as_well_or_there_alone_shuts_nothing() -> None:
    right = two_steps(lambda _, after: after, stages.FORCED)
    wrong = two_steps(one_kept(NORM), stages.FORCED)
    for benchmark, target in ((wrong, wrong), (wrong, right)):
        item, lone = judged(benchmark, target)
        assert lone is None and item is not None and item.state == "caveat"
    # one more on the target is the target's own
    item, lone = judged(wrong, two_steps(lambda before, _: before, stages.FORCED))
    assert lone is not None and NORM not in lone.evidence[1]


def test_the_page_counts_the_trainers_weights_and_not_an_engines_copy() -> None:
    own = trained(0)
    benchmark, target = Steps(), Steps()
    benchmark.entered(0, stages.GENERATE, 0, engine({n: v.bfloat16() for n, v in own.items()}))
    for side in (benchmark, target):
        side.entered(0, stages.LOG_PROB, 0, trainer(own))
    (row,) = side_by_side.weights(cast(Run, benchmark), cast(Run, target), 0)
    assert (row.model, row.same, row.different, row.alone) == ("actor", len(own), 0, 0)
