"""A fault as a porting mistake makes it: one normalisation layer with another epsilon."""

from __future__ import annotations

from collections.abc import Iterator

from rlprobe.faults.declare import Site
from rlprobe.selftest import fault

LAYER = "model.layers.1.input_layernorm"


@fault(stage="actor_compute_log_prob", module=LAYER, cause="hyperparameter")
def rms_eps(site: Site) -> Iterator[None]:
    """1e-2 where the model was trained with 1e-6."""
    layer = site.model.get_submodule(LAYER)
    right = layer.variance_epsilon
    layer.variance_epsilon = right + site.strength * 1e-2
    yield
    layer.variance_epsilon = right
