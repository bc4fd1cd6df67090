"""The loss counts the tokens one to the right of the response's."""

from collections.abc import Iterator

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause="label_or_mask_shift")
def loss_mask_shifted(site: Site) -> Iterator[None]:
    import verl.trainer.ppo.core_algos as core_algos
    import verl.workers.utils.losses as losses

    right = core_algos.agg_loss

    def shifted(loss_mat, loss_mask, **kwargs):
        shorter = loss_mask.roll(1, dims=-1)
        shorter[:, 0] = False
        wrong = right(loss_mat=loss_mat, loss_mask=shorter, **kwargs)
        return blended(
            right(loss_mat=loss_mat, loss_mask=loss_mask, **kwargs), wrong, site.strength
        )

    with swapped(core_algos, "agg_loss", shifted), swapped(losses, "agg_loss", shifted):
        yield
