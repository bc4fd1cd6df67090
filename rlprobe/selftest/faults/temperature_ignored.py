"""Log-probs of the model's distribution where those of the sampled one are meant (trl#4159)."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_compute_log_prob",
    cause="sampling_semantics",
    needs={"temperature": 0.7},
)
def temperature_ignored(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine._scale_logits_by_temperature

    def scaled(logits, temperature, **kwargs):
        return right(logits, temperature + site.strength * (1 - temperature), **kwargs)

    with swapped(engine, "_scale_logits_by_temperature", scaled):
        yield
