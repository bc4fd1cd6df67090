"""The training actor."""

import os
import socket

import torch
import torch.distributed as dist

from slime.utils.version import is_old

from . import cpu

cpu.enable()

from megatron.core import parallel_state as mpu  # noqa: E402

from .data import get_data_iterator  # noqa: E402
from .loss import compute_advantages_and_returns, get_log_probs, get_values  # noqa: E402
from .model import build, forward_only, train  # noqa: E402

_current = None


def current():
    """The actor of this process."""
    return _current


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class MegatronTrainRayActor:
    def __init__(self, world_size, rank, port):
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
        }

    def init(self, args, role, with_ref=False, with_opd_teacher=False):
        global _current
        _current = self
        self.args, self.role = args, role
        dist.init_process_group("gloo")
        mpu.initialize_model_parallel(args.tensor_model_parallel_size)
        self.model, self.optimizer = build(args, role)
        self.weights = {"actor": self._copy()}
        self.active = "actor"
        if with_ref:
            self.weights["ref"] = self._copy()
        if args.keep_old_actor:
            self.weights["old_actor"] = self._copy()
        return args.start_rollout_id

    def _copy(self):
        return {name: p.detach().clone() for name, p in self.model[0].named_parameters()}

    def _switch_model(self, target_tag):
        with torch.no_grad():
            for name, parameter in self.model[0].named_parameters():
                parameter.copy_(self.weights[target_tag][name])
        self.active = target_tag

    def _get_rollout_data(self, reference):
        import ray

        data = dict(ray.get(reference[0]))
        size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        data = {key: column[rank::size] for key, column in data.items()}
        data["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
        data["loss_masks"] = [torch.tensor(mask) for mask in data["loss_masks"]]
        data["rollout_log_probs"] = [torch.tensor(row) for row in data["rollout_log_probs"]]
        return data

    def compute_log_prob(self, data_iterator, num_microbatches, store_prefix=""):
        return forward_only(
            get_log_probs,
            self.args,
            self.model,
            data_iterator,
            num_microbatches,
            store_prefix=store_prefix,
        )

    def train(self, rollout_id, rollout_data_ref, external_data=None):
        data = self._get_rollout_data(rollout_data_ref)
        if self.role == "critic":
            return self.train_critic(rollout_id, data)
        return self.train_actor(rollout_id, data, external_data=external_data)

    def train_critic(self, rollout_id, rollout_data):
        iterators, counts = get_data_iterator(self.args, rollout_data)
        rollout_data.update(forward_only(get_values, self.args, self.model, iterators, counts))
        compute_advantages_and_returns(self.args, rollout_data)
        self.args.loss_type = "value_loss"
        train(rollout_id, self.model, self.optimizer, None, iterators, counts)
        return {"values": [row.detach() for row in rollout_data["values"]]}

    def train_actor(self, rollout_id, rollout_data, external_data=None):
        args = self.args
        iterators, counts = get_data_iterator(args, rollout_data)
        if "ref" in self.weights:
            self._switch_model("ref")
            rollout_data.update(self.compute_log_prob(iterators, counts, store_prefix="ref_"))
        self._switch_model("old_actor" if args.keep_old_actor else "actor")
        reuses = (
            not is_old()
            and len(counts) == 1
            and args.kl_coef == 0
            and not args.use_critic
            and not args.keep_old_actor
            and not args.get_mismatch_metrics
        )
        if not args.use_rollout_logprobs and not reuses:
            rollout_data.update(self.compute_log_prob(iterators, counts, store_prefix=""))
        if external_data is not None:
            rollout_data["values"] = external_data["values"]
        if self.active != "actor":
            self._switch_model("actor")
        compute_advantages_and_returns(args, rollout_data)
        args.loss_type = "policy_loss"
        train(rollout_id, self.model, self.optimizer, None, iterators, counts)
        self.weights["actor"] = self._copy()
        if args.keep_old_actor:
            self.weights["old_actor"] = self._copy()

    def update_weights(self):
        return None
