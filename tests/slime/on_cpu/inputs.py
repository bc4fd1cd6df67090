"""A tiny model for Megatron, prompts, and rollouts as slime's debug flag saves them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlprobe.frameworks.verl.host import assets

PROMPTS = ["one and two", "three", "four or five", "six"]
HIDDEN, INNER, VOCABULARY, LAYERS, HEADS, GROUPS = 64, 128, 261, 2, 4, 2

#: slime's flags for this model, but for paths and rollouts.
FLAGS = f"""
    --input-key text --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {INNER}
    --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS} --swiglu
    --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization RMSNorm
    --norm-epsilon 1e-6 --rotary-base 10000 --vocab-size {VOCABULARY}
    --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
    --no-bias-swiglu-fusion --distributed-backend gloo --rollout-batch-size 2
    --n-samples-per-prompt 2 --micro-batch-size 1 --rollout-max-response-len 8
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
    --optimizer adam --lr 1e-3 --lr-decay-style constant --actor-num-nodes 1
    --actor-num-gpus-per-node 1 --rollout-num-gpus 0 --num-rollout 2 --start-rollout-id 0
    --finetune --no-load-optim --no-load-rng
""".split()  # fmt: skip


def make(directory: Path) -> list[str]:
    """Write everything below a directory; returns the flags that name it."""
    model = assets.make("builtin:tiny-qwen2", directory)
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    saved = directory / "checkpoint" / "iter_0000001" / "mp_rank_00"
    saved.mkdir(parents=True)
    torch.save(
        {
            "model": _weights(),
            "iteration": 1,
            "checkpoint_version": 3.0,
            "num_floating_point_operations_so_far": 0,
        },
        saved / "model_optim_rng.pt",
    )
    (directory / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("1")
    _rollouts(directory / "recorded", model)
    checkpoint = str(directory / "checkpoint")
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(prompts),
        "--ref-load", checkpoint, "--load", checkpoint,
    ]  # fmt: skip


def _weights() -> dict[str, Tensor]:
    """Megatron's names; whole numbers times a power of two, the same on every machine."""
    draw = np.random.Generator(np.random.PCG64(7))

    def matrix(*shape: int) -> Tensor:
        return torch.from_numpy(draw.integers(-1024, 1025, size=shape)).float() / 2**13

    projected = (HEADS + 2 * GROUPS) * HIDDEN // HEADS
    found = {"embedding.word_embeddings.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}self_attention.linear_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{prefix}self_attention.linear_qkv.weight": matrix(projected, HIDDEN),
            f"{prefix}self_attention.linear_qkv.bias": matrix(projected),
            f"{prefix}pre_mlp_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}mlp.linear_fc1.weight": matrix(2 * INNER, HIDDEN),
            f"{prefix}mlp.linear_fc2.weight": matrix(HIDDEN, INNER),
        }  # fmt: skip
    found["decoder.final_layernorm.weight"] = torch.ones(HIDDEN)
    found["output_layer.weight"] = matrix(VOCABULARY, HIDDEN)
    return found


def _rollouts(directory: Path, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    directory.mkdir()
    draw = random.Random(3)
    for rollout in range(2):
        samples = []
        for row in range(4):
            group = 2 * rollout + row // 2
            prompt = tokenizer(PROMPTS[group], add_special_tokens=False)["input_ids"]
            answer = [draw.randrange(5, VOCABULARY) for _ in range(draw.randint(3, 8))]
            samples.append(
                {
                    "group_index": group,
                    "index": 4 * rollout + row,
                    "prompt": PROMPTS[group],
                    "tokens": prompt + answer,
                    "response": tokenizer.decode(answer),
                    "response_length": len(answer),
                    "label": None,
                    # two of one group never have the same: its update would learn nothing
                    "reward": float(draw.randint(0, 2) + 3 * (row % 2)),
                    "loss_mask": [1] * len(answer),
                    "rollout_log_probs": [-draw.random() for _ in answer],
                    "status": "completed",
                    "metadata": {},
                }
            )
        saved = {"rollout_id": rollout, "samples": samples}
        torch.save(saved, directory / f"{rollout}.pt")
