"""Rotary frequencies of another base: a configuration that was not carried over."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.rotary_emb"


@fault(stage="reference_compute_log_prob", module=PATH, cause=("hyperparameter", "position"))
def rope_theta(site: Site) -> Iterator[None]:
    rotary = site.model.get_submodule(PATH)
    with swapped(rotary, "inv_freq", rotary.inv_freq ** (1 + 0.25 * site.strength)):
        yield
