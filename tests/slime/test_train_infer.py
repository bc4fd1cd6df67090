"""Training against inference for slime: both sides' hooks, and ``rlprobe compare --train-infer``.

What stands in for SGLang and slime is in ``prefill.py``; msprobe, megatron-core, the hooks and the
comparison are the real ones. Only prompts go through both, as with ``PROMPTS_ONLY=1``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from rlprobe.cli import main
from tests.installed import needs
from tests.slime.prefill import PROMPTS

pytestmark = needs("megatron.core")


HERE = Path(__file__).parent
STANDIN = HERE / "standin"


def run(*words: str | Path, **environ: str) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def configuration(directory: Path, name: str) -> str:
    path = directory / f"{name}.json"
    section = {"scope": [], "list": [], "data_mode": ["forward"]}
    path.write_text(
        json.dumps(
            {
                "task": "tensor",
                "dump_path": str(directory / name),
                "rank": [],
                "step": [],
                "level": "L0",
                "tensor": section,
            }
        )
    )
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log-prob stage of the prompts, dumped by slime's users' own configuration."""
    directory = tmp_path_factory.mktemp("prefill")
    run(
        HERE / "prefill.py", "train", directory, "--hf-checkpoint", STANDIN / "model",
        "--keep-old-actor",
        RLPROBE_CONFIG=configuration(directory, "train"), DUMP_ON="1",
        RLPROBE_SLIME_PRECISION="fp32", RLPROBE_STAGES="old_log_prob", PYTHONPATH=str(STANDIN),
    )  # fmt: skip
    assert {path.name for path in (directory / "train").iterdir()} == {"old_log_prob", "rlprobe"}
    return directory


@pytest.fixture(scope="module")
def prefilled(trained: Path) -> dict[str, Path]:
    """The engine's dumps of the prompts: of the same weights, and with one weight another."""
    run(
        HERE / "prefill.py", "engine", trained,
        RLPROBE_INFERENCE_CONFIG=configuration(trained, "engine"),
    )  # fmt: skip
    steps = sorted((trained / "engine").iterdir(), key=lambda path: int(path.name[4:]))
    assert len(steps) == 2 * len(PROMPTS), "the health checks are no steps"
    for number, step in enumerate(steps):
        name = "same" if number < len(PROMPTS) else "other"
        (trained / name).mkdir(exist_ok=True)
        step.rename(trained / name / f"step{number % len(PROMPTS)}")
    return {name: trained / name for name in ("same", "other")}


def errors(trained: Path, engine: Path) -> dict[str, float]:
    """Of each module's output, as far as both sides computed it for the same tokens."""
    out = trained / f"{engine.name}-out"
    words = ["compare", "--train-infer", trained / "train", "--engine-dump", engine, "-o", out]
    assert main([str(word) for word in words]) == 0
    table = pl.read_parquet(out / "train_infer" / "records.parquet").filter(
        (pl.col("error_kind") == "tensor") & (pl.col("slot") == "output")
    )
    return dict(table.group_by("module").agg(pl.col("error").max()).iter_rows())


def test_the_prompts_tokens_are_compared_module_by_module(
    trained: Path, prefilled: dict[str, Path]
) -> None:
    found = errors(trained, prefilled["same"])
    for layer in (0, 1):
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp"):
            assert f"model.layers.{layer}.{part}" in found
    assert "model.embed_tokens" in found
    assert max(found.values()) < 1e-5, "two implementations of one model in fp32"


def test_an_engine_with_another_weight_differs_from_its_module_on(
    trained: Path, prefilled: dict[str, Path]
) -> None:
    found = errors(trained, prefilled["other"])
    beyond = {module for module, error in found.items() if error > 1e-4}
    assert "model.layers.1.mlp.down_proj" in beyond
    assert not any(module.startswith("model.layers.0.") for module in beyond)
    assert "model.layers.1.mlp.gate_up_proj" not in beyond
