"""The value loss lost its factor of one half."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("constant_factor", "loss"))
def value_loss_doubled(site: Site) -> Iterator[None]:
    import verl.workers.utils.losses as losses

    right = losses.compute_value_loss

    def doubled(*args, **kwargs):
        loss, clipped = right(*args, **kwargs)
        return loss * (1 + site.strength), clipped

    with swapped(losses, "compute_value_loss", doubled):
        yield
