"""slime's training loop without Ray: its manager and its actor in one process.

python whole.py FLAGS…        in the checkout's directory, with slime's own flags
"""

import os

import ray

ray.put = lambda value, **_: value
ray.get = lambda value, **_: value

import slime.ray.rollout as rollout  # noqa: E402
import slime.ray.train_actor as train_actor  # noqa: E402
from slime.backends.megatron_utils.actor import MegatronTrainRayActor  # noqa: E402
from slime.utils.arguments import parse_args  # noqa: E402


class Lock:
    """A Ray actor that the manager makes for its engines, of which there are none."""

    @classmethod
    def options(cls, **_):
        return cls

    @classmethod
    def remote(cls):
        return None


def main():
    train_actor.get_local_gpu_id = lambda: 0
    rollout.Lock = Lock
    # v0.2 starts a router for engines that a replay does not have
    if hasattr(rollout, "_start_router"):
        rollout._start_router = lambda *_, **__: None
    args = parse_args()
    manager = rollout.RolloutManager.__ray_metadata__.modified_class(args, None)
    actor = MegatronTrainRayActor(1, 0, "127.0.0.1", 20000 + os.getpid() % 10000)
    actor.init(args, "actor", with_ref=True)
    manager.set_train_parallel_config(actor.train_parallel_config)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        actor.train(rollout_id, manager.generate(rollout_id))
    manager.dispose()


if __name__ == "__main__":
    main()
