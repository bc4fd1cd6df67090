"""Results of a regrouped batch come back in the order they were computed, not that of the rows."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", cause="row_order")
def answers_of_other_rows(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.logprobs_from_logits

    def reordered(logits, labels, **kwargs):
        found = right(logits, labels, **kwargs)
        half = len(found) // 2
        return found.roll(half)

    with swapped(engine, "logprobs_from_logits", reordered):
        yield
