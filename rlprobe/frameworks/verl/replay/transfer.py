"""verl's newer trainer: rollouts lie in TransferQueue, and generation returns nothing.

What a step trained on is read back from the queue when the step is over, before the trainer clears
it. Rows stand in the order of prompts and their repetitions, not in the trainer's, which differs
from run to run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlprobe.errors import ReplayError
from rlprobe.frameworks.verl.replay import rollouts
from rlprobe.rollouts import Ragged, Rollouts, Sample, hdf5, matching, sample_ids

#: Tensors of a sample that generation produced; what later stages added is theirs.
_TENSORS = (
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "rm_scores",
    "routed_experts",
)
#: What else generation says of a sample.
_COLUMNS = ("num_turns", "extra_fields")


def is_queued(prompts: Any) -> bool:
    """Whether these prompts are the newer trainer's (a TensorDict and not a DataProto)."""
    return not hasattr(prompts, "meta_info")


def is_validation(prompts: Any) -> bool:
    """Whether the newer trainer asks for these answers in order to validate."""
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get(prompts, "validate", False))


def record(batch: Any, directory: Path, *, step: int, trainer_step: int, config: Any) -> Path:
    """Write ``step{N}.h5`` of the samples a step trained on.

    Args:
        batch: the trainer's ``KVBatchMeta`` (partition, keys, tags).
        directory: where the file goes.
        step, trainer_step: counted from 0, and the trainer's own number.
        config: the trainer's configuration.

    Raises:
        ReplayError: the queue holds no prompts or responses under the batch's keys.
    """
    import transfer_queue

    keys = [
        key
        for key, tag in zip(batch.keys, batch.tags, strict=True)
        if not (tag or {}).get("is_padding", False)
    ]
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id)
    lacking = [name for name in ("prompts", "responses") if name not in data]
    if lacking:
        raise ReplayError(
            f"step {step}: the transfer queue has no {', '.join(lacking)} for the "
            f"{len(keys)} samples of the step, so they cannot be recorded"
        )
    count = len(keys)
    identities = rollouts.identities_of(
        lambda name: column(data[name], count) if name in data else None, count, "the queue"
    )
    responses = [row.tolist() for row in data["responses"].unbind(0)]
    order = _order(keys, identities, responses)
    recorded = Rollouts(
        step=step,
        trainer_step=trainer_step,
        sampling=rollouts.sampling(config),
        meta={"source": rollouts.QUEUE},
    )
    for name in _TENSORS:
        if name not in data:
            continue
        rows = [row.detach().cpu() for row in data[name].unbind(0)]
        recorded.tensors[name] = Ragged.from_rows([rows[i].numpy() for i in order])
    recorded.values[matching.OUTPUT] = [_place(keys[row])[-1] for row in order]
    for name in _COLUMNS:
        values = column(data[name], count) if name in data else [None]
        if None not in values:
            recorded.values[name] = [rollouts.plain(values[row]) for row in order]
    recorded.samples = _samples(recorded, step, [identities[i] for i in order], config)
    recorded.check()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step{step}.h5"
    hdf5.write(path, recorded)
    return path


def _order(keys: list[str], identities: list[str], responses: list[list[int]]) -> list[int]:
    """Rows by prompt, the answers of one prompt together, in the order of its sessions.

    A prompt that was drawn twice has two random ids; what tells those apart in every run is what
    was answered.
    """
    rows = sorted(range(len(keys)), key=lambda row: _place(keys[row]))
    answers: dict[str, list[list[int]]] = {}
    for row in rows:
        answers.setdefault(_uid(keys[row]), []).append(responses[row])
    return sorted(rows, key=lambda row: (identities[row], answers[_uid(keys[row])]))


def _uid(key: str) -> str:
    return key.rsplit("_", 2)[0]


def _place(key: str) -> tuple[int, ...]:
    """``(session, output)`` of a queue's key ``{uid}_{session}_{output}``."""
    return tuple(int(part) for part in key.rsplit("_", 2)[1:])


def column(value: Any, count: int) -> list[Any]:
    """One value a row of what tensordict keeps beside its tensors."""
    values = value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)
    return list(values) if isinstance(values, list) and len(values) == count else [values] * count


def _samples(recorded: Rollouts, step: int, identities: list[str], config: Any) -> list[Sample]:
    tokenizer = rollouts.tokenizer(config.actor_rollout_ref.model.path)
    prompts, responses = recorded.tensors["prompts"], recorded.tensors["responses"]
    scores = recorded.tensors.get("rm_scores")
    assert isinstance(prompts, Ragged)
    assert isinstance(responses, Ragged)
    found = []
    for row, (name, identity) in enumerate(
        zip(sample_ids(step, identities), identities, strict=True)
    ):
        prompt, response = prompts.row(row).tolist(), responses.row(row).tolist()
        reward = float(np.sum(scores.row(row))) if isinstance(scores, Ragged) else None
        found.append(
            Sample.build(
                name,
                identity,
                prompt,
                response,
                prompt_text=tokenizer.decode(prompt),
                response_text=tokenizer.decode(response),
                reward=reward,
            )
        )
    return found
