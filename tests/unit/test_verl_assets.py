"""Are the builtin models the same on every machine?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rlprobe.frameworks.verl.host import assets
from tests.installed import needs

pytestmark = needs("transformers")


def digest(directory: Path) -> str:
    from safetensors.numpy import load_file

    total = hashlib.sha256()
    for name, values in sorted(load_file(directory / "model.safetensors").items()):
        total.update(name.encode() + b"\0" + values.tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-qwen2", "84b03f14f33a50c0"),
        ("tiny-qwen2-critic", "a6ef5939482b9d1e"),
    ],
)
def test_weights_are_these_bytes_whatever_the_kernels(
    name: str, expected: str, tmp_path: Path
) -> None:
    """The digests were computed with AVX-512 and with the plainest kernels; VERSION tells them."""
    made = assets.make(f"builtin:{name}", tmp_path)
    assert made.name == f"{name}-{assets.VERSION}"
    assert digest(made).startswith(expected)
