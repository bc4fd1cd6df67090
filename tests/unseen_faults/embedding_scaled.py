"""Embeddings are multiplied by the root of the hidden width (Gemma's convention)."""

from collections.abc import Iterator

from rlprobe.faults.patching import output_of
from rlprobe.selftest import Site, fault

PATH = "model.embed_tokens"


@fault(stage="critic_compute_values", module=PATH, cause="constant_factor")
def embedding_scaled(site: Site) -> Iterator[None]:
    root = site.model.config.hidden_size**0.5
    with output_of(site.model.get_submodule(PATH), lambda x: x * (1 + site.strength * (root - 1))):
        yield
