"""Scores are scaled by the hidden width of the whole model instead of a head's."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.self_attn"


@fault(stage="actor_compute_log_prob", module=PATH, cause=("hyperparameter", "constant_factor"))
def attention_scale(site: Site) -> Iterator[None]:
    attention = site.model.get_submodule(PATH)
    wrong = site.model.config.hidden_size**-0.5
    scaling = attention.scaling + site.strength * (wrong - attention.scaling)
    with swapped(attention, "scaling", scaling):
        yield
