"""Token sketches are fp32 whatever the model computes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from rlprobe.capture.engine import StageContext
from rlprobe.capture.light.token_sketches import K, TokenSketches, token_sketch
from rlprobe.frameworks.verl.wide import Wide


def test_a_control_in_fp64_writes_what_the_store_reads(tmp_path: Path) -> None:
    context = StageContext("actor_compute_log_prob", 0, 0, tmp_path)
    written = TokenSketches(tmp_path, context, 1 << 20)
    output = torch.randn(2, 5, 24, dtype=torch.float64)
    with Wide():
        written.add("Module.model.layers.0.Block.forward.0.output.0", 0, output)
    assert written.publish() > 0
    with np.load(written.path, allow_pickle=False) as arrays:
        sketch = arrays["sketch"]
    assert sketch.dtype == np.float32 and sketch.shape == (10, K)
    assert np.array_equal(sketch, token_sketch(output).numpy())


def sketched(tmp_path: Path, output: object) -> np.ndarray:
    written = TokenSketches(
        tmp_path, StageContext("actor_generate_sequences", 0, 0, tmp_path, True), 1 << 20
    )
    written.add("Module.model.layers.0.Block.forward.0.output.0", 0, output)
    written.publish()
    with np.load(written.path, allow_pickle=False) as arrays:
        return np.asarray(arrays["sketch"])


def test_an_engines_block_is_sketched_with_its_residual_stream(tmp_path: Path) -> None:
    """vLLM's and SGLang's blocks leave the last addition to the norm of the next one."""
    added, stream = torch.randn(2, 5, 24)
    whole = token_sketch(added + stream).numpy()
    assert np.allclose(sketched(tmp_path, (added, stream)), whole, atol=1e-5)


@pytest.mark.parametrize(
    "beside",
    [(torch.randn(5, 5),), (torch.zeros(5, 24, dtype=torch.int64),), (None,),
     (torch.randn(5, 24), torch.randn(5, 24))],
    ids=["weights", "integers", "nothing", "three"],
)  # fmt: skip
def test_what_else_a_block_gives_is_not_added(tmp_path: Path, beside: tuple[object, ...]) -> None:
    hidden = torch.randn(5, 24)
    assert np.array_equal(sketched(tmp_path, (hidden, *beside)), token_sketch(hidden).numpy())
