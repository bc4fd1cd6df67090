"""Reading what verl hands to its workers: flags, samples and key data.

verl 0.8 and 0.9's older trainer pass a ``TensorDict`` with padded prompts, responses and
attention_mask and jagged input_ids; the newer trainer's are jagged throughout and have no
attention_mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlprobe import stages
from rlprobe.rollouts.digest import sample_digest

#: What every stage is given of the samples; taken once a step.
_SAMPLES = (
    "responses",
    "input_ids",
    "attention_mask",
    "prompts",
    "position_ids",
    "rollout_log_probs",
)
#: Inputs of a stage that are key data, by stage: each is taken where it is first complete.
_INPUTS: dict[str, tuple[str, ...]] = {
    stages.LOG_PROB: _SAMPLES,
    stages.ACTOR_UPDATE: ("token_level_rewards", "advantages"),
}
#: Where a key is absent, what it is equal to: the newer trainer keeps one of the two when there is
#: no KL term in the reward (see ``_compute_metrics`` of its ``trainer_base``).
_EQUAL = {"token_level_rewards": "rm_scores"}
#: Of an update in a step without a log-prob stage (verl's bypass mode takes the engine's).
_BYPASSED = (*_SAMPLES, "old_log_probs")

#: Outputs of a micro batch that are key data: verl's name -> the contract's.
_OUTPUTS: dict[str, dict[str, str]] = {
    stages.REFERENCE: {"log_probs": "ref_log_prob"},
    stages.LOG_PROB: {"log_probs": "old_log_probs", "entropy": "entropys"},
    stages.VALUES: {"values": "values"},
}

#: Likewise, of an alignment only: what a diagnosis needs to tell a stage that computes wrongly from
#: one that is given something wrong. verl's name -> ours.
_INPUTS_OF_ALIGNMENT: dict[str, dict[str, str]] = {
    stages.ACTOR_UPDATE: {
        "old_log_probs": "given_old_log_probs",
        "ref_log_prob": "given_ref_log_prob",
        "response_mask": "given_actor_mask",
    },
    stages.CRITIC_UPDATE: {
        "values": "given_values",
        "returns": "given_returns",
        "response_mask": "given_critic_mask",
    },
}
_OUTPUTS_OF_ALIGNMENT: dict[str, dict[str, str]] = {
    stages.ACTOR_UPDATE: {"log_probs": "update_log_probs", "entropy": "update_entropys"},
    stages.CRITIC_UPDATE: {"values": "update_values"},
}


def flag(data: Any, key: str, default: Any = None) -> Any:
    """A non-tensor entry of a batch, whichever container this version uses."""
    for attribute in ("extra_info", "meta_info"):
        container = getattr(data, attribute, None)
        if isinstance(container, dict):
            return container.get(key, default)
    from verl.utils import tensordict_utils

    return tensordict_utils.get(data, key, default)


def tensor(data: Any, key: str) -> torch.Tensor | None:
    """A tensor entry of a batch, or None."""
    if data is None or not hasattr(data, "keys") or key not in data.keys():  # noqa: SIM118
        return None
    value = data[key]
    return value if isinstance(value, torch.Tensor) else None


def tensors(data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, by name."""
    for key in data.keys() if hasattr(data, "keys") else ():
        value = tensor(data, str(key))
        if value is not None:
            yield str(key), value


def sample_digests(data: Any) -> list[str]:
    """One digest per row over its valid prompt and response tokens; empty when there are none."""
    prompts, responses = tensor(data, "prompts"), tensor(data, "responses")
    if prompts is None or responses is None:
        return []
    mask = tensor(data, "attention_mask")
    rows = zip(_rows(prompts), _rows(responses), strict=True)
    digests = []
    for index, (prompt, response) in enumerate(rows):
        if mask is not None and not mask.is_nested:
            valid = mask[index].bool().cpu()
            prompt = prompt[valid[: len(prompt)]]
            response = response[valid[len(valid) - len(response) :]]
        digests.append(sample_digest(prompt.tolist(), response.tolist()))
    return digests


def token_ids(data: Any) -> list[npt.NDArray[np.int64]] | None:
    """The tokens of each row of a micro-batch, without padding; None where they are not told."""
    ids, mask = tensor(data, "input_ids"), tensor(data, "attention_mask")
    if ids is None:
        return None
    rows = list(_rows(ids))
    if not ids.is_nested:
        if mask is None or mask.is_nested or mask.shape != ids.shape:
            return None
        rows = [row[own] for row, own in zip(rows, mask.bool().cpu(), strict=True)]
    return [row.numpy().astype(np.int64) for row in rows]


def _rows(value: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter([row.detach().cpu() for row in (value.unbind() if value.is_nested else value)])


def key_inputs(
    stage: str, data: Any, aligning: bool, bypassed: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The key data among a micro batch's inputs.

    Args:
        stage: canonical name.
        data: verl's micro batch.
        aligning: whether this is a run of an alignment, and not the vendor's collector.
        bypassed: whether this step has no log-prob stage.
    """
    names = [(name, name) for name in _INPUTS.get(stage, ())]
    if bypassed and stage == stages.ACTOR_UPDATE:
        names += [(name, name) for name in _BYPASSED]
    if aligning:
        names += _INPUTS_OF_ALIGNMENT.get(stage, {}).items()
    for name, ours in names:
        value = tensor(data, name)
        if value is None and name in _EQUAL:
            value = tensor(data, _EQUAL[name])
        if value is not None:
            yield ours, value


def key_outputs(stage: str, output: Any, aligning: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The key data among a micro batch's model outputs; see :func:`key_inputs`."""
    names = _OUTPUTS.get(stage, {})
    if aligning:
        names = names | _OUTPUTS_OF_ALIGNMENT.get(stage, {})
    for name, ours in names.items():
        value = output.get(name) if isinstance(output, dict) else tensor(output, name)
        if isinstance(value, torch.Tensor):
            yield ours, value


#: What a stage hands back is called ours behind this.
_HANDED = "handed_"


def handed(stage: str, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The key data that a stage hands back, in the order of its samples."""
    names = {"log_probs", "values"} & _OUTPUTS.get(stage, {}).keys()
    for name in names:
        value = tensor(result, name)
        if value is not None:
            yield f"{_HANDED}{_OUTPUTS[stage][name]}", value


def loss_parts(metrics: Any) -> Iterator[tuple[str, float]]:
    """The scalars a loss function reports of a micro batch, by verl's names."""
    for name, value in (metrics or {}).items():
        scalar = value.aggregate() if hasattr(value, "aggregate") else value
        if isinstance(scalar, (int, float)) or getattr(scalar, "ndim", None) == 0:
            yield str(name), float(scalar)
