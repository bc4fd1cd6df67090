"""A recipe: a script of the user's own, Ray started by it, a worker that overrides a stage.

The worker does not call verl's method, and lives in ``__main__``: it is pickled by value.
"""

from pathlib import Path

import hydra
import ray
import verl
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.main_ppo import run_ppo
from verl.trainer.main_ppo_v0 import TaskRunner
from verl.utils.device import auto_set_device
from verl.workers.engine_workers import ActorRolloutRefWorker

Runner = TaskRunner.__ray_metadata__.modified_class


class OwnWorker(ActorRolloutRefWorker):
    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data):
        return self.actor.infer_batch(data).cpu()


class OwnRunner(Runner):  # type: ignore[misc, valid-type]
    def add_actor_rollout_worker(self, config):
        _, groups = super().add_actor_rollout_worker(config)
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(OwnWorker)
        return OwnWorker, groups


@hydra.main(
    config_path=str(Path(verl.__file__).parent / "trainer/config"),
    config_name="ppo_trainer",
    version_base=None,
)
def main(config):
    auto_set_device(config)
    ray.init(
        num_cpus=12,
        num_gpus=1,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        object_store_memory=200_000_000,
    )
    run_ppo(config, task_runner_class=ray.remote(OwnRunner))


if __name__ == "__main__":
    main()
