"""Is memory that nothing has written told from a result that differs?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlprobe.judge import reasons
from tests.msprobe.dumps import call, tensor
from tests.unit.diagnose.test_diagnose_dumps import diagnosed, leaf, model

pytestmark = pytest.mark.slow

GARBAGE = (tensor((1e30, -3e8, 7.0, 2e30)), tensor((0.0, 0.0, 0.0, 0.0)))
NAN = (tensor((math.nan,) * 4), tensor((0.0, 0.0, 0.0, 0.0)))


def verdict(tmp: Path, name: str, inputs: Any, outputs: Any, **more: Any) -> Any:
    """Both sides of one call before the model: what stands in it by side."""
    b, t = ({f"{name}.0.forward": call(inputs(n), outputs(n), **more)} | model() for n in (0, 1))
    return diagnosed(tmp, b, t)[1]


@pytest.mark.parametrize("values", [GARBAGE, NAN])
@pytest.mark.parametrize("name", ["Torch.empty", "Torch.empty_like", "Tensor.new_empty"])
def test_empty_memory_is_no_result(tmp_path: Path, name: str, values: Any) -> None:
    found = verdict(tmp_path, name, lambda n: [], lambda n: [values[n]])
    assert found["verdict"] == "aligned", found["sentence"]
    assert found["extent"]["actor_update"]["0"]["excused"] == {reasons.UNWRITTEN: 1}


@pytest.mark.parametrize("values", [GARBAGE, NAN])
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("Distributed.all_gather_into_tensor", lambda v: [v, leaf(1.0)]),
        ("Distributed.all_gather", lambda v: [[v, v], leaf(1.0)]),
        ("Distributed._reduce_scatter_base", lambda v: [v, leaf(1.0)]),
        ("Distributed.gather", lambda v: [leaf(1.0), [v, v]]),
        ("Distributed.recv", lambda v: [v]),
        ("NPU_Distributed.irecv", lambda v: [v]),
    ],
)
def test_what_a_collective_fills_is_not_looked_at_before(
    tmp_path: Path, name: str, inputs: Any, values: Any
) -> None:
    found = verdict(tmp_path, name, lambda n: inputs(values[n]), lambda n: [leaf(2.0)])
    assert found["verdict"] == "aligned", found["sentence"]
    assert reasons.UNWRITTEN in found["extent"]["actor_update"]["0"]["excused"]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        # what is sent, what comes out, and what only sounds alike
        ("Distributed.all_gather_into_tensor", lambda v: [leaf(1.0), v], lambda v: [leaf(2.0)]),
        ("Distributed.all_gather_into_tensor", lambda v: [leaf(1.0)], lambda v: [v]),
        ("Distributed.all_reduce", lambda v: [v], lambda v: [leaf(2.0)]),
        ("Distributed.send", lambda v: [v], lambda v: []),
        ("Torch.gather", lambda v: [leaf(1.0), v], lambda v: [leaf(2.0)]),
        ("Torch.zeros", lambda v: [], lambda v: [v]),
        ("Torch.empty_cache_like", lambda v: [], lambda v: [v]),
    ],
)
def test_what_is_written_is_judged(tmp_path: Path, name: str, inputs: Any, outputs: Any) -> None:
    values = GARBAGE
    found = verdict(tmp_path, name, lambda n: inputs(values[n]), lambda n: outputs(values[n]))
    assert found["verdict"] == "diverged", found["sentence"]
