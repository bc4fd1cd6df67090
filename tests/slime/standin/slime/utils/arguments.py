"""The flags that the tests' alignments give."""

import argparse
from pathlib import Path

from slime.backends.megatron_utils.arguments import with_defaults

_TEXT = [
    "hf-checkpoint",
    "prompt-data",
    "load",
    "ref-load",
    "critic-load",
    "save-debug-rollout-data",
    "load-debug-rollout-data",
    "save-debug-train-data",
    "custom-generate-function-path",
]
_SWITCHES = [
    "fp16",
    "use-kl-loss",
    "keep-old-actor",
    "use-rollout-logprobs",
    "get-mismatch-metrics",
]
_NUMBERS = {
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 1,
    "seed": 1234,
    "rollout-seed": 42,
    "rollout-batch-size": 2,
    "n-samples-per-prompt": 2,
    "micro-batch-size": 1,
    "rollout-max-response-len": 6,
    "num-critic-only-steps": 0,
    "tensor-model-parallel-size": 1,
}


def parse_args():
    parser = argparse.ArgumentParser()
    for name in _TEXT:
        parser.add_argument(f"--{name}")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("num-rollout", "start-rollout-id", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    for name, default in (("kl-coef", 0.0), ("lr", 1e-3), ("rollout-temperature", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--advantage-estimator", default="grpo")
    parser.add_argument("--load-debug-rollout-data-subsample", type=float)
    args = with_defaults(parser.parse_args())
    args.debug_train_only = args.load_debug_rollout_data is not None
    args.use_critic = args.advantage_estimator == "ppo"
    if args.global_batch_size is None:
        args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt
    if args.load is not None and args.start_rollout_id is None:
        # as slime: training goes on behind the checkpoint's iteration
        tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
        args.start_rollout_id = int(tracker.read_text()) + 1
    args.start_rollout_id = args.start_rollout_id or 0
    return args
