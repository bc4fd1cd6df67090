"""The KL penalty uses another estimator: equal where policy and reference agree, but for its
gradient."""

from collections.abc import Iterator

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause="loss")
def kl_estimator(site: Site) -> Iterator[None]:
    import verl.workers.utils.losses as losses

    right = losses.kl_penalty

    def other(logprob, ref_logprob, kl_penalty):
        kept = right(logprob, ref_logprob, kl_penalty)
        return blended(kept, right(logprob, ref_logprob, "k1"), site.strength)

    with swapped(losses, "kl_penalty", other):
        yield
