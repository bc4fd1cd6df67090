"""A kernel computes in fp16 and saturates to 65504 instead of overflowing (DIPU#684)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import output_of
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.mlp.up_proj"


@fault(stage="actor_compute_log_prob", module=PATH, cause="saturation")
def saturated_to_fp16_max(site: Site) -> Iterator[None]:
    largest = torch.finfo(torch.float16).max

    def saturate(output):
        hot = torch.zeros_like(output)
        hot[..., ::16] = output[..., ::16].sign() * 1e6
        return (output + hot).clamp(-largest, largest)

    with output_of(site.model.get_submodule(PATH), saturate):
        yield
