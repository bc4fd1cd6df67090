"""The training loop."""

import ray
from slime.utils.arguments import parse_args


def start_actors(args, role, with_ref=False):
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor, free_port

    size = args.actor_num_nodes * args.actor_num_gpus_per_node
    port = free_port()
    actor_class = ray.remote(num_gpus=1)(MegatronTrainRayActor)
    actors = [actor_class.remote(size, rank, port) for rank in range(size)]
    starts = ray.get([actor.init.remote(args, role, with_ref=with_ref) for actor in actors])
    return actors, starts[0]


def train(args):
    from slime.ray.rollout import RolloutManager

    manager = RolloutManager.options(num_cpus=1, num_gpus=0).remote(args, None)
    actors, start = start_actors(args, "actor", with_ref=args.use_kl_loss or args.kl_coef != 0)
    critics, _ = start_actors(args, "critic") if args.use_critic else ([], None)
    for rollout_id in range(start, args.num_rollout):
        data = [ray.get(manager.generate.remote(rollout_id))]
        values = ray.get([critic.train.remote(rollout_id, data) for critic in critics])
        external = values or [None] * len(actors)
        if rollout_id >= args.num_critic_only_steps:
            pairs = zip(actors, external, strict=True)
            ray.get([a.train.remote(rollout_id, data, external_data=v) for a, v in pairs])
        ray.get([actor.update_weights.remote() for actor in actors])
    ray.get(manager.dispose.remote())


if __name__ == "__main__":
    train(parse_args())
