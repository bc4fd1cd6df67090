"""The loss is averaged within each response first, so that short ones weigh more."""

from collections.abc import Iterator

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause="loss", needs={"response_lengths": "varied"})
def loss_per_sequence(site: Site) -> Iterator[None]:
    import verl.trainer.ppo.core_algos as core_algos
    import verl.workers.utils.losses as losses

    right = core_algos.agg_loss

    def averaged(loss_mat, loss_mask, loss_agg_mode, **kwargs):
        kept = right(loss_mat=loss_mat, loss_mask=loss_mask, loss_agg_mode=loss_agg_mode, **kwargs)
        wrong = right(
            loss_mat=loss_mat, loss_mask=loss_mask, loss_agg_mode="seq-mean-token-mean", **kwargs
        )
        return blended(kept, wrong, site.strength)

    with swapped(core_algos, "agg_loss", averaged), swapped(losses, "agg_loss", averaged):
        yield
