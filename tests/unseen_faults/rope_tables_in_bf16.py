"""Cosines and sines are cached in bf16."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="reference_compute_log_prob", module="model.rotary_emb", cause="rounding_order")
def rope_tables_in_bf16(site: Site) -> Iterator[None]:
    rotary = site.model.get_submodule("model.rotary_emb")
    right = rotary.forward

    def forward(x, position_ids):
        tables = right(x, position_ids)
        coarse = (table.to(torch.bfloat16).to(table.dtype) for table in tables)
        return tuple(blended(a, b, site.strength) for a, b in zip(tables, coarse, strict=True))

    with swapped(rotary, "forward", forward):
        yield
