"""What could go unjudged in silence: cases with their answers, written before any of them was run.

Each changes files of finished runs of one aligned alignment (PPO with a critic, two mini-batches,
fp32). ``NOTICED``: the verdict or the state of an item of the gate must change. ``SAID``: at least
``extent`` must count what is not judged. What both sides lack, or have alike, is in half of them:
agreement of nothing is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tests.unjudged.copy import Copy

NOTICED, SAID = "noticed", "said"
BENCHMARK, TARGET, REPEAT = "benchmark", "target", "repeat"
BOTH = (BENCHMARK, TARGET, REPEAT)
LOG_PROB, ACTOR, CRITIC = "actor_compute_log_prob", "actor_update", "critic_update"
VALUES = "critic_compute_values"
UPDATES = ("grad", "grad_reduced", "grad_clipped", "change")


@dataclass(frozen=True)
class Case:
    name: str
    change: Callable[[Copy], Any]
    answer: str
    #: Files of the target without which there is nothing to change.
    needs: str | None = None


CASES: dict[str, Case] = {}


def case(
    answer: str, needs: str | None = None
) -> Callable[[Callable[[Copy], Any]], Callable[[Copy], Any]]:
    def add(change: Callable[[Copy], Any]) -> Callable[[Copy], Any]:
        CASES[change.__name__] = Case(change.__name__, change, answer, needs)
        return change

    return add


def _rows(copy: Copy, roles: tuple[str, ...], stage: str, kept: pl.Expr) -> None:
    for role in roles:
        copy.table(role, f"records/{stage}.parquet", lambda table: table.filter(kept))


def _key_data(name: str, where: str = "step0/rank0/*") -> str:
    return f"dump/data/{name}/{where}/{name}.npy"


def _last(copy: Copy, name: str) -> str:
    return copy.files(TARGET, _key_data(name))[-1]


def _one(value: Any) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        flat = array.reshape(-1)
        flat[len(flat) // 2] = value if not callable(value) else value(flat[len(flat) // 2])
        return array

    return change


# ---- what both sides lack


@case(NOTICED)
def log_probs_of_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.remove(role, "dump/data/old_log_probs/**/*")


@case(NOTICED)
def what_the_update_was_given_of_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.remove(role, "dump/data/given_old_log_probs/**/*")
        copy.remove(role, "dump/data/advantages/**/*")


@case(NOTICED)
def no_gradients_and_changes_on_either_side(copy: Copy) -> None:
    _rows(copy, BOTH, ACTOR, ~pl.col("slot").is_in(UPDATES))


@case(NOTICED)
def no_backward_pass_on_either_side(copy: Copy) -> None:
    _rows(copy, BOTH, ACTOR, pl.col("direction") != "backward")


@case(NOTICED)
def no_losses_on_either_side(copy: Copy) -> None:
    _rows(copy, BOTH, CRITIC, pl.col("slot") != "loss")


@case(NOTICED)
def the_second_mini_batch_on_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.table(
            role,
            f"records/{ACTOR}.parquet",
            lambda t: t.filter(
                ~(
                    (
                        pl.col("slot").is_in(["grad_reduced", "grad_clipped", "change"])
                        & (pl.col("call") >= 1)
                    )
                    | (pl.col("direction").is_in(["forward", "backward"]) & (pl.col("call") >= 2))
                )
            ),
        )


@case(NOTICED)
def a_layer_of_neither_side(copy: Copy) -> None:
    _rows(copy, BOTH, LOG_PROB, ~pl.col("name").str.contains("layers.1.", literal=True))


@case(NOTICED)
def no_metrics_of_the_step_on_either_side(copy: Copy) -> None:
    for role in BOTH:
        copy.remove(role, "metrics.jsonl")


@case(NOTICED)
def no_gradient_norm_on_either_side(copy: Copy) -> None:
    for role in BOTH:
        copy.remove(role, "dump/data/*grad_norm/**/*")
        copy.metrics(role, lambda m: {k: v for k, v in m.items() if "grad_norm" not in k})


@case(NOTICED)
def a_stage_that_neither_side_proves(copy: Copy) -> None:
    def without(value: Any) -> Any:
        value["samples"] = [e for e in value["samples"] if e["stage"] != ACTOR]
        return value

    for role in BOTH:
        copy.document(role, "mock_proof.json", without)


@case(NOTICED)
def weights_of_a_stage_on_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.table(role, "weights.parquet", lambda t: t.filter(pl.col("stage") != VALUES))


@case(NOTICED)
def one_parameter_digested_on_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.table(
            role, "weights.parquet", lambda t: t.filter(~pl.col("name").str.contains("down_proj"))
        )


@case(NOTICED)
def settings_of_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.remove(role, "dump/configurations.json")


@case(NOTICED)
def environment_of_neither_side(copy: Copy) -> None:
    for role in BOTH:
        copy.remove(role, "environment.json")


@case(NOTICED)
def values_of_one_micro_batch_on_neither_side(copy: Copy) -> None:
    for role in BOTH:
        last = copy.files(role, _key_data("update_log_probs"))[-1]
        copy.changed(role, {last: None, last.removesuffix("npy") + "json": None})


@case(NOTICED)
def no_sketches_on_either_side(copy: Copy) -> None:
    for role in BOTH:
        copy.table(
            role,
            f"records/{LOG_PROB}.parquet",
            lambda t: t.with_columns(sketch=pl.lit(None), digest=pl.lit(None)),
        )


# ---- what both sides have alike, and cannot be


@case(NOTICED)
def a_stage_in_bf16_on_both_sides(copy: Copy) -> None:
    for role in BOTH:
        copy.table(
            role,
            f"records/{LOG_PROB}.parquet",
            lambda t: t.with_columns(
                dtype=pl.col("dtype").replace("torch.float32", "torch.bfloat16")
            ),
        )


@case(SAID)
def a_metric_that_is_nan_on_both_sides(copy: Copy) -> None:
    for role in BOTH:
        copy.metrics(
            role, lambda m: m | {"actor/entropy": float("nan"), "actor/pg_loss": float("nan")}
        )


@case(NOTICED)
def log_probs_above_zero_on_both_sides(copy: Copy) -> None:
    for role in BOTH:
        for name in copy.files(role, _key_data("ref_log_prob")):
            copy.array(role, name, lambda a: -a)


@case(NOTICED)
def log_probs_zero_in_one_sample_on_both_sides(copy: Copy) -> None:
    for role in BOTH:
        name = copy.files(role, _key_data("old_log_probs"))[0]

        def zero(array: Any) -> Any:
            array[: max(1, len(array) // 2)] = 0
            return array

        copy.array(role, name, zero)


# ---- what one side alone has otherwise


@case(NOTICED)
def nan_log_prob_of_one_token(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "old_log_probs"), _one(np.nan))


@case(NOTICED)
def nan_log_prob_of_one_token_in_the_second_update(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "update_log_probs"), _one(np.nan))


@case(NOTICED)
def nan_value_of_one_token_in_the_second_update(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "update_values"), _one(np.nan))


@case(NOTICED)
def nan_return_of_one_token(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "given_returns"), _one(np.nan))


@case(NOTICED)
def nan_advantage_of_one_token(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "advantages"), _one(np.nan))


@case(NOTICED, needs="dump/data/update_entropys/**/*.npy")
def entropy_of_one_token_in_the_second_update_twice_as_large(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "update_entropys"), _one(lambda v: 2 * v))


@case(NOTICED)
def mask_of_one_token_in_the_second_mini_batch(copy: Copy) -> None:
    copy.array(TARGET, _last(copy, "given_actor_mask"), _one(0))


@case(NOTICED)
def weights_kept_in_bf16_with_the_same_numbers(copy: Copy) -> None:
    copy.table(TARGET, "weights.parquet", lambda t: t.with_columns(dtype=pl.lit("torch.bfloat16")))


@case(NOTICED)
def weights_whose_norms_contradict_their_digests(copy: Copy) -> None:
    copy.table(TARGET, "weights.parquet", lambda t: t.with_columns(norm=pl.col("norm") * 1.5))


@case(NOTICED)
def key_data_made_in_bf16_and_saved_in_fp32(copy: Copy) -> None:
    def coarse(value: Any) -> Any:
        value["data"]["dtype"] = "torch.bfloat16"
        return value

    for name in copy.files(TARGET, "dump/data/old_log_probs/**/old_log_probs.json"):
        copy.document(TARGET, name, coarse)


@case(NOTICED)
def key_data_whose_statistics_contradict_their_values(copy: Copy) -> None:
    def other(value: Any) -> Any:
        value["data"]["norm"] = 10 * value["data"]["norm"] + 1
        return value

    for name in copy.files(TARGET, "dump/data/values/**/values.json"):
        copy.document(TARGET, name, other)


@case(NOTICED)
def tokens_whose_sketches_contradict_their_record(copy: Copy) -> None:
    copy.table(
        TARGET,
        f"token_sketches/{LOG_PROB}.parquet",
        lambda t: t.with_columns(
            sketch=pl.when(pl.int_range(pl.len()) == 40)
            .then(pl.col("sketch").list.eval(3 * pl.element()))
            .otherwise("sketch")
        ),
    )


@case(NOTICED, needs="logical/*.parquet")
def a_record_by_coordinates_that_contradicts_its_calls(copy: Copy) -> None:
    copy.table(
        TARGET,
        f"logical/{LOG_PROB}.parquet",
        lambda t: t.with_columns(
            squares=pl.when(pl.int_range(pl.len()) == 9)
            .then(4 * pl.col("squares"))
            .otherwise("squares"),
            sketch=pl.when(pl.int_range(pl.len()) == 9)
            .then(pl.col("sketch").list.eval(2 * pl.element()))
            .otherwise("sketch"),
        ),
    )


@case(NOTICED)
def a_stage_without_sketches_on_the_target(copy: Copy) -> None:
    copy.table(
        TARGET,
        f"records/{LOG_PROB}.parquet",
        lambda t: t.with_columns(sketch=pl.lit(None), digest=pl.lit(None)),
    )


@case(NOTICED)
def a_loss_whose_value_contradicts_its_digest(copy: Copy) -> None:
    loss = (pl.col("slot") == "loss") & pl.col("value").is_not_null()
    mean = (pl.col("slot") == "loss") & pl.col("mean").is_not_null()
    copy.table(
        TARGET,
        f"records/{ACTOR}.parquet",
        lambda t: t.with_columns(
            value=pl.when(loss).then(pl.lit("7.5")).otherwise("value"),
            mean=pl.when(mean).then(7.5).otherwise("mean"),
        ),
    )


@case(NOTICED)
def another_shape_of_the_same_numbers(copy: Copy) -> None:
    first = (pl.col("slot") == "output") & (pl.col("shape").list.len() == 3)
    copy.table(
        TARGET,
        f"records/{VALUES}.parquet",
        lambda t: t.with_columns(
            shape=pl.when(first & (first.cum_sum() == 1))
            .then(pl.col("shape").list.reverse())
            .otherwise("shape")
        ),
    )


@case(NOTICED)
def two_micro_batches_of_a_stage_in_another_order(copy: Copy) -> None:
    def swapped(value: Any) -> Any:
        for entry in value["samples"]:
            if entry["stage"] == LOG_PROB:
                entry["samples"] = (
                    entry["samples"][2:4] + entry["samples"][:2] + entry["samples"][4:]
                )
        return value

    copy.document(TARGET, "mock_proof.json", swapped)


@case(NOTICED)
def the_last_micro_batch_of_a_stage_on_the_benchmark_only(copy: Copy) -> None:
    _rows(copy, (TARGET,), LOG_PROB, pl.col("call") < 3)
    for key in ("old_log_probs", "entropys"):
        name = _last(copy, key)
        copy.changed(TARGET, {name: None, name.removesuffix("npy") + "json": None})


@case(NOTICED)
def a_metric_that_is_text_on_the_target(copy: Copy) -> None:
    copy.metrics(TARGET, lambda m: m | {"actor/entropy": "n/a"})


@case(NOTICED)
def switches_of_one_process_not_recorded(copy: Copy) -> None:
    def without(value: Any) -> Any:
        for process in value["processes"].values():
            process.pop("switches", None)
        return value

    copy.document(TARGET, "environment.json", without)


@case(NOTICED)
def a_control_that_hides_what_the_target_does(copy: Copy) -> None:
    """The repeat differs as the target does, so that the floor is as wide as the fault."""
    wrong = (pl.col("slot") == "output") & (pl.col("norm") > 0)
    other = {
        "norm": 1.5 * pl.col("norm"),
        "digest": pl.col("digest").str.reverse(),
        "sketch": pl.col("sketch").list.eval(1.5 * pl.element()),
    }
    changed = {name: pl.when(wrong).then(new).otherwise(name) for name, new in other.items()}
    for role in (TARGET, REPEAT):
        copy.table(role, f"records/{LOG_PROB}.parquet", lambda t: t.with_columns(**changed))
