"""A step of reinforcement learning of a tiny transformer, captured in this process.

transformers' own modules, weights in fp32, bf16 by autocast, AdamW, two micro-batches; reference
log-probs, log-probs and an update. A change of kernels is entered for the time of a run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from rlprobe import stages
from rlprobe.capture.recorder import Recorder
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.faults.patching import swapped
from rlprobe.rollouts import Rollouts, hdf5
from rlprobe.rollouts.model import Sample

STAGES = (stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE)
VOCABULARY, PROMPT, RESPONSE, ROWS, MICRO = 61, 6, 10, 4, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
#: Norms, biases, grouped keys, experts, parallel residuals: what architectures differ in.
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, num_key_value_heads=2),
    "llama": lambda: transformers.LlamaConfig(**_SIZES, num_key_value_heads=4),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, shared_expert_intermediate_size=48, decoder_sparse_step=1,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_SIZES, rotary_pct=0.5),
}  # fmt: skip


def start() -> None:
    """One thread, and kernels that repeat themselves."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def _model(architecture: str, seed: int, attention: str) -> Any:
    config = ARCHITECTURES[architecture]()
    config._attn_implementation = attention
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return made.train(mode=False)


def _rollouts(seed: int) -> tuple[Rollouts, torch.Tensor]:
    tokens = np.random.default_rng(1000 + seed).integers(0, VOCABULARY, (ROWS, PROMPT + RESPONSE))
    samples = [
        Sample.build(f"s0-{row}", f"prompt {row}", tokens[row, :PROMPT], tokens[row, PROMPT:],
                     f"What is {row}+1?", f"answer {row}", float(row % 2))
        for row in range(ROWS)
    ]  # fmt: skip
    made = Rollouts(
        step=0, trainer_step=1, samples=samples, tensors={"responses": tokens[:, PROMPT:]},
        sampling={"temperature": 1.0, "top_p": 1.0, "n": 1},
    )  # fmt: skip
    return made, torch.from_numpy(tokens)


def run(
    scratch: Path,
    architecture: str,
    precision: str,
    seed: int,
    change: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    attention: str = "eager",
    role: str = "target",
) -> None:
    """Leave in ``scratch`` what a captured run leaves."""
    side = scratch / "side"
    (scratch / "dump").mkdir(parents=True)
    side.mkdir()
    recorded, tokens = _rollouts(seed)
    if role == "benchmark":
        hdf5.write(side / "rollouts" / "step0.h5", recorded)
    (side / "run.json").write_text(json.dumps({"role": role, "command": ["benign"]}))
    session = Session(
        role=role, framework="verl", dump=str(scratch / "dump"), side=str(side),
        capture=CaptureOptions(stages=STAGES), collect_rollouts=role == "benchmark",
    )  # fmt: skip
    digests = [sample.sample_digest for sample in recorded.samples]
    rewards = torch.tensor([sample.reward for sample in recorded.samples])
    models = {r: _model(architecture, seed, attention) for r in ("ref", "actor")}
    recorders = {
        r: Recorder(session, role=r, rank=0, world_size=1, layout={"backend": "none"})
        for r in models
    }
    coarse = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with change(), coarse:
        logs = {}
        for stage, owner in ((stages.REFERENCE, "ref"), (stages.LOG_PROB, "actor")):
            logs[stage] = _forward(recorders[owner], stage, models[owner], tokens, digests)
        _update(recorders["actor"], models["actor"], tokens, digests, rewards,
                logs[stages.LOG_PROB], logs[stages.REFERENCE])  # fmt: skip


def _log_probs(model: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones_like(rows)
    logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits.float()
    all_logs = torch.log_softmax(logits[:, :-1], dim=-1)
    picked = all_logs.gather(-1, rows[:, 1:, None])[..., 0]
    return picked, -(all_logs.exp() * all_logs).sum(-1)


def _micros() -> Iterator[tuple[int, slice]]:
    for number, at in enumerate(range(0, ROWS, MICRO)):
        yield number, slice(at, at + MICRO)


def _forward(
    recorder: Recorder, stage: str, model: Any, tokens: torch.Tensor, digests: list[str]
) -> torch.Tensor:
    found = []
    with recorder.stage(stage, 0, 1, model) as scope, torch.no_grad():
        scope.samples(digests)
        for number, part in _micros():
            rows = tokens[part]
            scope.micro_step(number)
            scope.rows(digests[part], number)
            logs, entropy = _log_probs(model, rows)
            found.append(logs)
            answer = logs[:, PROMPT - 1 :]
            if stage == stages.LOG_PROB:
                scope.key_data("prompts", rows[:, :PROMPT])
                scope.key_data("responses", rows[:, PROMPT:])
                scope.key_data("input_ids", rows)
                scope.key_data("old_log_probs", answer)
                scope.key_data("entropys", entropy[:, PROMPT - 1 :])
            else:
                scope.key_data("ref_log_prob", answer)
    return torch.cat(found)


def _update(
    recorder: Recorder,
    model: Any,
    tokens: torch.Tensor,
    digests: list[str],
    rewards: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
) -> None:
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    with recorder.stage(stages.ACTOR_UPDATE, 0, 1, model, optimizer=optimizer) as scope:
        scope.samples(digests)
        for number, part in _micros():
            scope.micro_step(number)
            scope.rows(digests[part], number)
            given = advantages[part, None].expand(-1, RESPONSE)
            scope.key_data("advantages", given)
            scope.key_data("token_level_rewards", rewards[part, None].expand(-1, RESPONSE))
            logs, _ = _log_probs(model, tokens[part])
            mine, before, other = (x[:, PROMPT - 1 :] for x in (logs, old[part], reference[part]))
            ratio = torch.exp(mine - before)
            policy = -(given * torch.minimum(ratio, ratio.clamp(0.8, 1.2))).mean()
            away = other - mine
            kl = (away.exp() - away - 1).mean()
            loss = (policy + 0.001 * kl) * (MICRO / ROWS)
            scope.loss("loss", loss)
            scope.loss("actor/pg_loss", policy)
            scope.loss("actor/kl_loss", kl)
            loss.backward()
        scope.gradients("grad_reduced")
        scope.gradient_norms(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scope.gradients("grad_clipped")
        optimizer.step()
        scope.total_norm(norm)
    if not math.isfinite(float(norm)):
        raise ArithmeticError("the step's gradients are not finite")


_linear = torch.nn.functional.linear


def _parts(*cuts: float, reverse: bool = False) -> Callable[..., Any]:
    """A linear layer that sums its width in parts, each a product of its own."""

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        width = x.shape[-1]
        edges = [0, *(int(cut * width) for cut in cuts), width]
        spans = [slice(a, b) for a, b in itertools.pairwise(edges) if b > a]
        total = None
        for span in reversed(spans) if reverse else spans:
            one = _linear(x[..., span], weight[:, span])
            total = one if total is None else total + one
        return total if bias is None else total + bias.to(total.dtype)

    return linear


def _backwards(x: Any, weight: Any, bias: Any = None) -> Any:
    return _linear(x.flip(-1), weight.flip(-1), bias)


_softmax = torch.nn.functional.softmax


def _softmax_in_double(x: Any, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
    return _softmax(x.double(), dim=dim).to(dtype or x.dtype)


def _silu_by_exp(x: Any, inplace: bool = False) -> Any:
    return x / (1 + torch.exp(-x))


def _linear_is(value: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: swapped(torch.nn.functional, "linear", value)


@contextlib.contextmanager
def _both(*changes: Callable[[], Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change())
        yield


_SOFTMAX = functools.partial(swapped, torch.nn.functional, "softmax", _softmax_in_double)
_SILU = functools.partial(swapped, torch.nn.functional, "silu", _silu_by_exp)
_NO_ONEDNN = functools.partial(torch.backends.mkldnn.flags, enabled=False)
_FUSED = {"attention": "sdpa"}
#: Kernels of correct devices: name -> (what is entered, options of :func:`run`).
CHANGES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "halves": (_linear_is(_parts(0.5)), {}),
    "thirds": (_linear_is(_parts(1 / 3, 2 / 3)), {}),
    "thirds backwards": (_linear_is(_parts(1 / 3, 2 / 3, reverse=True)), {}),
    "quarters": (_linear_is(_parts(0.25, 0.5, 0.75)), {}),
    "uneven parts": (_linear_is(_parts(0.1, 0.3, 0.6)), {}),
    "sums backwards": (_linear_is(_backwards), {}),
    "fused attention": (contextlib.nullcontext, _FUSED),
    "softmax in double": (_SOFTMAX, {}),
    "silu by exp": (_SILU, {}),
    "no onednn": (_NO_ONEDNN, {}),
    "halves, fused": (_linear_is(_parts(0.5)), _FUSED),
    "backwards, no onednn": (lambda: _both(_linear_is(_backwards), _NO_ONEDNN), {}),
    "halves, softmax": (lambda: _both(_linear_is(_parts(0.5)), _SOFTMAX), {}),
    "uneven, silu": (lambda: _both(_linear_is(_parts(0.1, 0.6)), _SILU), {}),
    "backwards, fused": (_linear_is(_backwards), _FUSED),
}
