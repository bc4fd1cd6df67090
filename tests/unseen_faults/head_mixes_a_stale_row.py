"""The last product's output keeps a buffer of the call before in one row in four."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, output_of
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", module="lm_head", cause=("implementation", "row_order"))
def head_mixes_a_stale_row(site: Site) -> Iterator[None]:
    # the first call has nothing to keep and is right
    kept: list[torch.Tensor] = []

    def stale(output):
        found = output.clone()
        if kept and kept[0].shape == output.shape:
            found[:, ::4] = blended(output[:, ::4], kept[0][:, ::4], site.strength)
        kept[:] = [output.clone()]
        return found

    with output_of(site.model.get_submodule("lm_head"), stale):
        yield
