"""What every test of an inference engine starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlprobe.capture.session import ENV


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of an engine's process outlives a test."""
    # here, as an installation that only compares has no torch: there the tests are skipped
    import torch

    from rlprobe.frameworks.engines import forwards, handover, sglang, vllm

    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv(ENV, "")
    for module, name in ((vllm, "vllm"), (sglang, "sglang")):
        monkeypatch.setattr(module, "_forwards", forwards.Forwards(name))
    handover.taken.cache_clear()
    yield
    handover.taken.cache_clear()
