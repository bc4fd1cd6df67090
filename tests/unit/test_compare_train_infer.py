"""Are the prompt's tokens the same in training and in the engine, however both lay them out?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from torch import Tensor

from rlprobe.cli import main
from rlprobe.compare.traininfer import shards
from rlprobe.dumps import token_sketches
from rlprobe.rollouts.digest import sample_digest
from tests.msprobe import dumps
from tests.sampled import every_second
from tests.unit.train_infer_dumps import (
    SAMPLES,
    Batch,
    divided,
    engine,
    hugging_face,
    save,
    with_weights,
)
from tests.unit.train_infer_runs import (
    COMPARED,
    GENERATE,
    PROMPTS,
    ROUNDING,
    TRAINING,
    WHOLE,
    Errors,
    beside,
    compare,
    names,
    ragged,
    train,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["padded", "packed", "wrapped", "megatron"])
def test_prompt_tokens_meet_in_every_layout(tmp_path: Path, layout: str) -> None:
    train(tmp_path, layout)
    place = tmp_path / GENERATE / "step0/rank0"
    save(place, engine(Batch(PROMPTS[:2], {}), 0), engine(Batch(PROMPTS[2:], {}), 1))
    table, summary = compare(tmp_path)
    measured = table.filter(error_kind="tensor")
    assert names(measured) >= COMPARED
    assert measured["status"].unique().to_list() == ["matched"]
    assert measured["error"].max() < ROUNDING  # type: ignore[operator]
    assert "2 of 2 forward passes" in summary["notes"][0] and "(12 tokens of" in summary["notes"][0]


@pytest.mark.parametrize("layout", ["padded", "megatron"])
def test_an_error_of_one_projection_is_found_there(tmp_path: Path, layout: str) -> None:
    train(tmp_path, layout, {"1.k": lambda x: x * 1.01})
    save(tmp_path / GENERATE / "step0/rank0", engine(Batch(PROMPTS, {}), 0))
    table, _ = compare(tmp_path)
    beyond = table.filter(pl.col("error") > ROUNDING)
    assert names(beyond) == {"layers.1.self_attn.qkv_proj.output.0"}


def test_a_response_does_not_count(tmp_path: Path) -> None:
    def only_the_response(x: Tensor) -> Tensor:
        y = x.clone()
        y[-1] += 1  # the last token of every sequence is of its response
        return y

    train(tmp_path, "padded", {"0.o": only_the_response})
    decode = engine(Batch([[*PROMPTS[0], 20]], {"0.o": lambda x: x + 9}), 1, [(3, 4)])
    save(tmp_path / GENERATE / "step0/rank0", engine(Batch(PROMPTS, {}), 0), decode)
    table, summary = compare(tmp_path)
    assert table["error"].max() < ROUNDING  # type: ignore[operator]
    assert "1 of 2 forward passes" in summary["notes"][0]


def one_at_a_time(errors: Errors | None = None, from_token: int = 1) -> list[dict[str, Any]]:
    """Every sample as an engine serves it alone: the prompt, then token by token on its cache."""
    passes: list[dict[str, Any]] = []
    for prompt, response in SAMPLES:
        for at in range(len(response) + 1):
            known = [*prompt, *response[:at]]
            chunk = (0, len(prompt)) if at == 0 else (len(known) - 1, len(known))
            wrong = (errors or {}) if at >= from_token else {}
            passes.append(engine(Batch([known], wrong), len(passes), [chunk]))
    return passes


@pytest.mark.parametrize("layout", every_second(["padded", "packed", "megatron"]))
def test_generated_tokens_are_compared_where_one_request_is_served_at_a_time(
    tmp_path: Path, layout: str
) -> None:
    train(tmp_path, layout)
    save(tmp_path / GENERATE / "step0/rank0", *one_at_a_time())
    table, summary = compare(tmp_path)
    assert "10 of 10 forward passes" in summary["notes"][0]
    assert "(12 tokens of prompts, 6 generated ones)" in summary["notes"][0]
    assert table["error"].max() < ROUNDING  # type: ignore[operator]


@pytest.mark.parametrize("first", every_second([1, 2]))
def test_what_only_decoding_does_wrong_is_found_in_its_passes(tmp_path: Path, first: int) -> None:
    """As a cache whose rows are off by one would: prompts are right."""
    train(tmp_path, "padded")
    wrong = {"1.o": lambda x: x.roll(1, -1)}
    save(tmp_path / GENERATE / "step0/rank0", *one_at_a_time(wrong, first))
    table, _ = compare(tmp_path)
    beyond = table.filter(pl.col("error") > ROUNDING)
    # the norm after it takes its output and the stream
    assert names(beyond) == {
        "layers.1.self_attn.output.0", "layers.1.post_attention_layernorm.input.0"
    }  # fmt: skip
    assert beyond.height == 2 * sum(max(0, len(r) - first + 1) for _, r in SAMPLES)


def test_a_sequence_that_was_not_seen_from_its_beginning_is_not_guessed(tmp_path: Path) -> None:
    train(tmp_path, "padded")
    _, decoded, *_ = one_at_a_time()
    prefill = engine(Batch(PROMPTS[:2], {}), 2)
    save(tmp_path / GENERATE / "step0/rank0", decoded, prefill)
    _, summary = compare(tmp_path)
    assert "1 of 2 forward passes" in summary["notes"][0]


def test_a_cached_prefix_and_chunked_prompts(tmp_path: Path) -> None:
    train(tmp_path, "packed")
    first = engine(Batch([PROMPTS[0], PROMPTS[3]], {}), 0, [(0, 3), (0, 2)])
    second = engine(Batch([PROMPTS[3], PROMPTS[1]], {}), 1, [(2, 4), (0, 2)])
    save(tmp_path / GENERATE / "step0/rank0", first, second)
    table, summary = compare(tmp_path)
    assert table["error"].max() < ROUNDING  # type: ignore[operator]
    assert "2 of 2 forward passes" in summary["notes"][0] and "(9 tokens of" in summary["notes"][0]


def test_an_engines_dump_of_its_own_has_a_step_for_every_pass(tmp_path: Path) -> None:
    train(tmp_path, "megatron")
    own = tmp_path / "sglang"
    for step, prompt in enumerate(PROMPTS):
        save(own / f"step{step}/rank0", engine(Batch([prompt], {}), 0))
    table, summary = compare(tmp_path, "--engine-dump", str(own))
    assert "4 of 4 forward passes" in summary["notes"][0]
    assert table["error"].max() < ROUNDING  # type: ignore[operator]


def test_the_passes_of_an_engines_own_dump_go_to_their_training_steps(tmp_path: Path) -> None:
    """The second step has another model; one prompt is in both, and once at the border."""
    other = [11, 12, 13, 14]
    changed = {"0.k": lambda x: x * 1.01}
    for step, batch in enumerate(
        (Batch([WHOLE[0], WHOLE[1]], {}), Batch([WHOLE[0], WHOLE[3]], changed))
    ):
        save(tmp_path / TRAINING / f"step{step}/rank0", hugging_face(batch, 0))
    ran = [PROMPTS[0], PROMPTS[1], PROMPTS[0], other, PROMPTS[0]]
    for number, prompt in enumerate(ran):
        errors = changed if number > 2 else {}
        save(tmp_path / f"sglang/step{number}/rank0", engine(Batch([prompt], errors), 0))
    table, summary = compare(tmp_path, "--engine-dump", str(tmp_path / "sglang"))
    assert table["error"].max() < ROUNDING  # type: ignore[operator]
    assert set(table.filter(error_kind="tensor")["step"]) == {0, 1}
    border, *steps = (note for note in summary["notes"] if "forward passes" in note)
    assert "1 of 5 forward passes" in border and "several steps" in border
    assert [note.split(" forward")[0] for note in steps] == ["step 0: 2 of 2", "step 1: 2 of 2"]


@pytest.mark.parametrize("layout", ["padded", "megatron"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_of_the_engine_is_compared_with_its_part(
    tmp_path: Path, layout: str, size: int
) -> None:
    """With four ranks and two key and value heads, two ranks have the same ones."""
    train(tmp_path, layout)
    calls = engine(Batch(PROMPTS, {"1.v": lambda x: x * 1.01}), 0)
    for rank in range(size):
        save(tmp_path / GENERATE / f"step0/rank{rank}", divided(calls, rank, size))
    table, summary = compare(tmp_path)
    measured = table.filter(error_kind="tensor")
    for rank in range(size):
        assert names(measured.filter(rank_benchmark=rank)) >= COMPARED
    assert set(measured["status"]) == {"matched"}
    beyond = measured.filter(pl.col("error") > ROUNDING)
    assert names(beyond) == {"layers.1.self_attn.qkv_proj.output.0"}
    assert beyond.height == size and summary["ranks"]["benchmark"] == list(range(size))


def test_one_rank_alone_is_compared_and_weights_are_as_well(tmp_path: Path) -> None:
    batch = Batch(WHOLE, {})
    save(tmp_path / TRAINING / "step0/rank0", with_weights(hugging_face(batch, 0)))
    calls = divided(engine(Batch(PROMPTS, {}), 0), 1, 2)
    name = "Module.model.layers.1.mlp.down_proj.RowParallelLinear.forward.0"
    inputs, outputs, held = calls[name]
    calls[name] = inputs, outputs, {"weight": held["weight"] * 1.001}
    save(tmp_path / GENERATE / "step0/rank1", calls)
    table, _ = compare(tmp_path)
    weights = table.filter(slot="parameters")
    assert set(weights["status"]) == {"matched"} and set(weights["error_kind"]) == {"tensor"}
    assert weights.height == 4
    assert weights.filter(pl.col("error") > 0)["name"].to_list() == [f"{name}.parameters.weight"]
    inner = table.filter(name=f"{name}.input.0")
    assert inner["status"].to_list() == ["matched"] and inner["error"].max() < ROUNDING  # type: ignore[operator]


def test_what_is_no_division_is_said_to_be_none(tmp_path: Path) -> None:
    train(tmp_path, "padded")
    calls = engine(Batch(PROMPTS, {}), 0)
    name = "Module.model.layers.0.mlp.gate_up_proj.MergedColumnParallelLinear.forward.0"
    inputs, (whole, bias) = calls[name]
    calls[name] = (inputs, [whole[:, :6], bias])
    save(tmp_path / GENERATE / "step0/rank0", calls)
    table, _ = compare(tmp_path)
    (row,) = table.filter(name=f"{name}.output.0").iter_rows(named=True)
    assert row["status"] == "shape" and row["error"] is None and not row["identical"]
    assert "6 values in the engine and 16 in training" in row["reason"]


def test_a_part_that_no_rank_can_have_is_refused() -> None:
    whole = np.arange(32.0).reshape(2, 16)
    assert shards.piece(whole, [8, 4, 4], 8, 1, 2).tolist() == [
        [4, 5, 6, 7, 10, 11, 14, 15],
        [20, 21, 22, 23, 26, 27, 30, 31],
    ]
    assert shards.piece(whole[:1], [8, 4, 4], 6, 2, 4).tolist() == [[4, 5, 10, 11, 14, 15]]
    assert shards.piece(whole[:1], [4], 2, 3, 4).tolist() == [[2, 3]]
    with pytest.raises(ValueError, match=r"7 values of 8 \+ 4 \+ 4 in training.* 2 ranks"):
        shards.piece(whole, [8, 4, 4], 7, 0, 2)
    assert shards.ranks([(8, 16), (4, 8), (8, 8), (6, 16), (4, 16)]) == 2
    assert shards.ranks([(8, 8), (6, 16)]) == 1


def test_other_prompts_are_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "padded")
    save(tmp_path / GENERATE / "step0/rank0", engine(Batch([[40, 41, 42]], {}), 0))
    command = ["compare", "--train-infer", str(tmp_path), "-o", str(beside(tmp_path))]
    assert main(command) == 4
    assert "0 of 1 forward passes" in capsys.readouterr().err
    assert main([*command, "--no-fail"]) == 0


@pytest.mark.parametrize("stage", [TRAINING, GENERATE])
def test_a_missing_stage_is_named(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in (TRAINING, GENERATE, "actor_update"):
        if other != stage:
            save(tmp_path / other / "step0/rank0", engine(Batch(PROMPTS, {}), 0))
    command = ["compare", "--train-infer", str(tmp_path), "-o", str(beside(tmp_path))]
    assert main(command) == 4
    assert f"has no stage {stage}" in capsys.readouterr().err


def sketch_table(root: Path, stage: str, rows: list[tuple[Any, ...]], cls: str) -> None:
    """Token sketches of several blocks: rows (rank, micro step, call, row, token, values)."""
    name = f"Module.model.layers.{{}}.{cls}.forward.{{}}.output.0"
    table = pl.DataFrame(
        [
            (0, rank, 5 + layer, name.format(layer, call), m, row, t, (v + layer).tolist())
            for layer in range(12)
            for rank, m, call, row, t, v in rows
        ],
        schema=token_sketches.SCHEMA,
        orient="row",
    )
    (root / "token_sketches").mkdir(exist_ok=True)
    table.write_parquet(root / "token_sketches" / f"{stage}.parquet")


def test_without_tensors_token_sketches_are_compared(tmp_path: Path) -> None:
    """Requests in another order than training's rows, decoding after prefill, FSDP's class name."""

    def sketch(sample: int, token: int) -> np.ndarray[Any, Any]:
        # samples 0 and 2 have the same prompt
        return np.random.default_rng([SAMPLES[sample][0][0], token]).standard_normal(17)

    for stage in (TRAINING, GENERATE):
        name = "Module.model.norm.RMSNorm.forward.0"
        dumps.write(tmp_path / stage / "step0/rank0", {name: dumps.call([], [dumps.tensor()])})
    order = [(0, [3, 1]), (1, [2, 0])]
    for micro, some in order:
        ragged(tmp_path / "data", (0, micro), some)
    training = []
    for micro, some in order:
        tokens = [(s, t) for s in some for t in range(len(WHOLE[s]))]
        for at, (s, t) in enumerate(tokens):
            wrong = 1e-2 if (s, t) == (3, 2) else 0
            training.append((0, micro, micro, 0, at, sketch(s, t) * (1 + wrong)))
    sketch_table(tmp_path, TRAINING, training, "FSDPQwen2DecoderLayer")
    requests = [0, 1, 2, 3]
    engine_rows = []
    for number, s in enumerate(requests):
        length = len(PROMPTS[s])
        engine_rows += [(0, number, 2 * number, 0, t, sketch(s, t)) for t in range(length)]
        engine_rows.append((0, number, 2 * number + 1, 0, 0, np.ones(17)))  # a generated token
    sketch_table(tmp_path, GENERATE, engine_rows, "Qwen2DecoderLayer")
    digests = [sample_digest(*SAMPLES[s]) for s in requests]
    proof = [{"step": 0, "rank": 0, "stage": GENERATE, "role": "actor", "samples": [d]}
             for d in digests]  # fmt: skip
    (tmp_path / "mock_proof.json").write_text(json.dumps({"format": 1, "samples": proof}))
    _, summary = compare(tmp_path)
    assert summary["samples"]["token_sketches"]["tokens"] == 12 * sum(map(len, PROMPTS))
    table = pl.read_parquet(beside(tmp_path) / "train_infer/token_sketches.parquet")
    beyond = table.filter(pl.col("error") > ROUNDING)
    assert beyond.select("sample", "token").rows() == [(digests[3], 2)] * 12
    assert beyond["error"][0] == pytest.approx(1e-2, rel=1e-3)
    assert beyond["name"].n_unique() == 12


def test_statistics_alone_are_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in (TRAINING, GENERATE):
        name = "Module.model.norm.RMSNorm.forward.0"
        dumps.write(tmp_path / stage / "step0/rank0", {name: dumps.call([], [dumps.tensor()])})
    command = ["compare", "--train-infer", str(tmp_path), "-o", str(beside(tmp_path))]
    assert main(command) == 4
    assert "cannot be cut to the prompt's tokens" in capsys.readouterr().err
