"""Real verl: do the CPU engine and training agree on every prompt token, and is it said so?"""

from __future__ import annotations

import json

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions
from rlprobe.cli import main
from rlprobe.spec import RunSpec
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe]


def test_prompt_tokens_are_equal_in_training_and_in_the_engine(
    verl: Server, runs: dict[str, RunSpec]
) -> None:
    capture = CaptureOptions(
        engine="msprobe",
        task="tensor",
        stages=(stages.GENERATE, stages.LOG_PROB),
        token_range=(0, 1),
    )
    variant = verl.run("train-infer", runs["benchmark"], capture=capture, expected_stages=())
    assert variant.status == 0, variant.log[-3000:]
    out = variant.scratch.with_name(f"{variant.scratch.name}-out")
    assert main(["compare", "--train-infer", str(variant.scratch), "-o", str(out)]) == 0
    summary = json.loads((out / "train_infer/summary.json").read_text())
    assert "16 of 16 forward passes" in summary["notes"][0], "the prompt's pass and one token each"
    assert "8 generated ones" in summary["notes"][0]
    table = pl.read_parquet(out / "train_infer/records.parquet").filter(
        (pl.col("slot") == "output") & (pl.col("error_kind") == "tensor")
    )
    compared = {"embed_tokens", "q_proj", "o_proj", "mlp", "norm"}
    assert compared <= {module.rpartition(".")[2] for module in table["module"]}
    assert table["error"].max() < 1e-5  # type: ignore[operator]
