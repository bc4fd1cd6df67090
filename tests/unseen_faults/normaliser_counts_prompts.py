"""The actor's loss is divided by the tokens of prompts and responses, not of responses alone."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause=("constant_factor", "loss", "hyperparameter"))
def normaliser_counts_prompts(site: Site) -> Iterator[None]:
    import verl.trainer.ppo.core_algos as core_algos
    import verl.workers.utils.losses as losses

    right = core_algos.agg_loss

    def counted(*args, batch_num_tokens=None, **kwargs):
        more = batch_num_tokens * (1 + 2 * site.strength)
        return right(*args, batch_num_tokens=more, **kwargs)

    with swapped(core_algos, "agg_loss", counted), swapped(losses, "agg_loss", counted):
        yield
