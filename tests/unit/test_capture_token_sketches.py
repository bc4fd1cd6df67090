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
