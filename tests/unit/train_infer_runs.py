"""Runs whose trainer and engine are those of train_infer_dumps, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from rlprobe.cli import main
from tests.unit.train_infer_dumps import SAMPLES, Batch, hugging_face, megatron, packed, save

TRAINING, GENERATE = "actor_compute_log_prob", "actor_generate_sequences"
WHOLE = [[*prompt, *response] for prompt, response in SAMPLES]
PROMPTS = [prompt for prompt, _ in SAMPLES]
ROUNDING = 1e-6
#: Parts of the model that both sides compute, by the engine's record.
COMPARED = {
    "embed_tokens.output.0",
    *(
        f"layers.{n}.{name}"
        for n in (0, 1)
        for name in (
            "input_layernorm.input.0",
            "input_layernorm.output.0",
            "post_attention_layernorm.input.0",
            "self_attn.qkv_proj.input.0",
            "self_attn.qkv_proj.output.0",
            "self_attn.output.0",
            "mlp.gate_up_proj.input.0",
            "mlp.gate_up_proj.output.0",
            "mlp.down_proj.input.0",
            "mlp.input.0",
            "mlp.output.0",
            "input.0",
            "output.0",
        )
    ),
}
Errors = dict[str, Callable[[Tensor], Tensor]]


def train(root: Path, layout: str, errors: Errors | None = None) -> None:
    """The log-prob stage, in another order than the engine's and on two ranks."""
    batches = [Batch([WHOLE[i] for i in some], errors or {}) for some in ((3, 1), (2, 0))]
    for rank, batch in enumerate(batches):
        place = root / TRAINING / "step0" / f"rank{rank}"
        if layout == "padded":
            save(place, hugging_face(batch, 0))
        elif layout == "packed":
            save(place, packed(batch, 0))
        elif layout == "wrapped":
            save(place, hugging_face(batch, 0, wrapper="_fsdp_wrapped_module."))
        else:
            save(place, megatron(batch, 0))
            ragged(root / "data", (rank, 0), [(3, 1), (2, 0)][rank])


def ragged(data: Path, place: tuple[int, int], some: Sequence[int]) -> None:
    """The key data that tells packed samples apart."""
    for key, rows in (
        ("prompts", [SAMPLES[i][0] for i in some]),
        ("responses", [SAMPLES[i][1] for i in some]),
    ):
        ends = np.cumsum([len(row) for row in rows]).tolist()
        directory = data / key / "step0" / f"rank{place[0]}" / f"micro_step{place[1]}"
        directory.mkdir(parents=True)
        np.save(directory / f"{key}.npy", np.concatenate(rows))
        about = {"data": {"offsets": [0, *ends]}}
        (directory / f"{key}.json").write_text(json.dumps(about))


def beside(root: Path) -> Path:
    """Where results go: never into the run."""
    return root.with_name(f"{root.name}-out")


def compare(root: Path, *more: str) -> tuple[pl.DataFrame, dict[str, Any]]:
    command = ["compare", "--train-infer", str(root), "-o", str(beside(root)), *more]
    assert main(command) == 0
    out = beside(root) / "train_infer"
    return pl.read_parquet(out / "records.parquet"), json.loads((out / "summary.json").read_text())


def names(table: pl.DataFrame) -> set[str]:
    return {
        name.removeprefix("Module.model.").replace(".forward.", ".")
        for name in table["name"].str.replace(r"\.[A-Za-z0-9]+\.forward\.\d+", "").to_list()
    }
