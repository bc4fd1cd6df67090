"""A fault for the stand-in's model: one norm of the policy's log-probs with another epsilon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlprobe.selftest import fault


@fault(stage="old_log_prob", module="model.layers.1.input_layernorm", cause="hyperparameter")
def rms_eps(site: Any) -> Iterator[None]:
    layer = site.model.get_submodule("decoder.layers.1.input_layernorm")
    old, layer.eps = layer.eps, 1e-2
    yield
    layer.eps = old
