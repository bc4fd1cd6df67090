"""The value loss is Huber's instead of squares."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("loss", "implementation"))
def huber_value_loss(site: Site) -> Iterator[None]:
    import verl.trainer.ppo.core_algos as core_algos
    import verl.workers.utils.losses as losses

    right = losses.compute_value_loss

    def huber(vpreds, returns, values, response_mask, **kwargs):
        kept, clipped = right(
            vpreds=vpreds, returns=returns, values=values, response_mask=response_mask, **kwargs
        )
        apart = torch.nn.functional.huber_loss(vpreds, returns, reduction="none", delta=0.5)
        names = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
        given = {name: kwargs[name] for name in names if name in kwargs}
        mode = kwargs.get("loss_agg_mode", "token-mean")
        wrong = core_algos.agg_loss(
            loss_mat=apart, loss_mask=response_mask, loss_agg_mode=mode, **given
        )
        return kept + site.strength * (wrong - kept), clipped

    with swapped(losses, "compute_value_loss", huber):
        yield
