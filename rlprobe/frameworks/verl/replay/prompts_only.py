"""``PROMPTS_ONLY=1`` (:mod:`rlprobe.frameworks.prompts`) on verl: samples are prompts alone.

The engine generates one token, which is dropped, and is then led through the prompts
(:mod:`.forced`): one prefill of each, whose layers are the stage ``forced_generation`` and whose
log-probs are ``rollout_log_probs``. The trainer's log-prob stage runs over exactly those tokens.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl import DataProto

from rlprobe import stages
from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError
from rlprobe.frameworks import prompts
from rlprobe.frameworks.engines.forcing import Answer
from rlprobe.frameworks.verl.host import forced as host
from rlprobe.rollouts import Ragged, Rollouts, Sample, sample_ids
from rlprobe.rollouts.digest import prompt_digest


def wanted() -> bool:
    """Whether the mode is on in this process, the driver's.

    Raises:
        ConfigError: the variable is set to something else than 0 or 1.
    """
    return prompts.wanted(os.environ)


def prepare(session: Session | None, config: Any) -> Session | None:
    """Ask the engine for one token, and have it led through the prompts.

    Args:
        session: what is captured; None where nothing is.
        config: verl's, changed in place before any worker exists.

    Raises:
        ConfigError: nothing is captured, the run replays, or its engine cannot be led.
    """
    if not wanted():
        return session
    if session is None:
        raise ConfigError(
            f"{prompts.ENV}=1: nothing is captured; give the collector's YAML "
            "(+ascend_precision_collector=FILE), or unset it"
        )
    if session.replay is not None:
        raise ConfigError(
            f"{prompts.ENV}=1: this run replays rollouts, whose prompts were generated from; "
            "collect them with it, or unset it"
        )
    from omegaconf import OmegaConf, open_dict

    host.check(
        OmegaConf.to_container(config, resolve=True),
        session.capture,
        f"{prompts.ENV}=1",
        "unset it",
    )
    with open_dict(config):
        config.actor_rollout_ref.rollout.response_length = 1
    capture = dataclasses.replace(
        session.capture,
        stages=(*session.capture.stages, stages.FORCED),
        forced_tokens=0,
        forced_samples=None,
    )
    expected = (*session.expected_stages, stages.FORCED)
    return dataclasses.replace(session, capture=capture, expected_stages=expected)


def alone(output: DataProto, step: int, trainer_step: int) -> Rollouts:
    """The prompts of a generated batch as samples: the first token, and the rest as its response.

    Raises:
        ConfigError: a prompt is a single token.
    """
    width = output.batch["prompts"].shape[1]
    valid = output.batch["attention_mask"][:, :width].bool()
    rows = [row[mask].tolist() for row, mask in zip(output.batch["prompts"], valid, strict=True)]
    short = [number for number, row in enumerate(rows) if len(row) < 2]
    if short:
        raise ConfigError(
            f"{prompts.ENV}=1: the prompt of row {short[0]} has {len(rows[short[0]])} tokens; at "
            "least two are needed"
        )
    ids = sample_ids(step, [prompt_digest(row) for row in rows])
    return Rollouts(
        step=step,
        trainer_step=trainer_step,
        tensors={
            "prompts": Ragged.from_rows([row[:1] for row in rows]),
            "responses": Ragged.from_rows([row[1:] for row in rows]),
        },
        samples=[Sample.build(id, "", row[:1], row[1:]) for id, row in zip(ids, rows, strict=True)],
    )


def as_batch(output: DataProto, samples: Rollouts, answers: Mapping[str, Answer]) -> DataProto:
    """Generation's output with the prompts alone in it, padded on the right.

    Other tensors of generation are of the token that is dropped, and dropped with it.

    Args:
        output: of generation; its columns that are no tensors are kept.
        samples: of :func:`alone`.
        answers: the engine's, by a sample's digest.
    """
    responses = samples.tensors["responses"]
    assert isinstance(responses, Ragged)
    rows = [torch.from_numpy(responses.row(number).copy()) for number in range(len(samples))]
    longest = max(len(row) for row in rows)
    shape = (len(rows), longest)
    tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    log_probs = torch.zeros(shape)
    for number, (row, sample) in enumerate(zip(rows, samples.samples, strict=True)):
        tokens[number, : len(row)], mask[number, : len(row)] = row, 1
        found = answers[sample.sample_digest].prefill.log_probs
        log_probs[number, : len(found)] = torch.tensor(found)
    first = output.batch["prompts"][:, -1:].clone()
    starts = samples.tensors["prompts"]
    assert isinstance(starts, Ragged)
    first[:, 0] = torch.from_numpy(starts.values.copy())
    attention = torch.cat([torch.ones_like(first), mask], dim=1)
    made = {
        "prompts": first,
        "responses": tokens,
        "response_mask": mask,
        "input_ids": torch.cat([first, tokens], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "rollout_log_probs": log_probs,
    }
    if "rm_scores" in output.batch.keys():  # noqa: SIM118
        scores = torch.zeros(shape)
        scores[torch.arange(len(rows)), mask.sum(-1) - 1] = output.batch["rm_scores"].sum(-1)
        made["rm_scores"] = scores
    return DataProto(
        batch=TensorDict(made, batch_size=len(rows)),
        non_tensor_batch=output.non_tensor_batch,
        meta_info=output.meta_info,
    )
