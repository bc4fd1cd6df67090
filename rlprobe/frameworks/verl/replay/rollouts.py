"""verl's batches to and from recorded rollouts."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from rlprobe.errors import ReplayError
from rlprobe.frameworks.verl.engine import engines
from rlprobe.rollouts import (
    Ragged,
    Rollouts,
    Sample,
    matching,
    prompt_identity,
    sample_ids,
    vendor,
)
from rlprobe.rollouts.model import CARRIERS

#: Columns of a prompt that say which prompt it is, whatever ids and seeds this run gave it.
_MESSAGES = "raw_prompt"
_IDENTITY = (_MESSAGES, "data_source")
#: What ``meta["source"]`` says of rollouts of the newer trainer.
QUEUE = "transfer queue"
#: Entries of generation's meta_info that describe the run and not the rollouts.
_VOLATILE = ("timing", "metrics", "global_steps", "validate")

_TORCH_CARRIERS: dict[torch.dtype, tuple[str, torch.dtype]] = {
    torch.bfloat16: ("bfloat16", torch.uint16),
    torch.float8_e4m3fn: ("float8_e4m3fn", torch.uint8),
    torch.float8_e5m2: ("float8_e5m2", torch.uint8),
}


def identities(prompts: DataProto) -> list[str]:
    """One digest per row of the prompts a trainer asks to be answered."""
    return identities_of(prompts.non_tensor_batch.get, len(prompts), "the batch")


def identities_of(column: Callable[[str], Any], count: int, holder: str) -> list[str]:
    """One digest per row from the columns that say which prompt it is.

    Args:
        column: a column of ``count`` entries by name, None where there is none.
        count: rows.
        holder: what has the columns, for the message.

    Raises:
        ReplayError: there is none of the columns.
    """
    columns = {name: found for name in _IDENTITY if (found := column(name)) is not None}
    if not columns:
        raise ReplayError(
            f"{holder} has neither of {', '.join(_IDENTITY)}, so prompts cannot be told apart; "
            "set data.return_raw_chat=true"
        )
    return [
        prompt_identity({name: found[row] for name, found in columns.items()})
        for row in range(count)
    ]


def from_batch(
    prompts: DataProto,
    output: DataProto,
    *,
    step: int,
    trainer_step: int,
    config: Any,
    tokenizer: Any,
) -> Rollouts:
    """Everything the trainer got from generation in one step.

    Columns that have no JSON form (images) are named in ``meta["not_recorded"]``; a replay that
    needs one fails there and not silently.
    """
    recorded = Rollouts(step=step, trainer_step=trainer_step, sampling=sampling(config))
    for name, value in output.batch.items():
        array, carrier = _to_numpy(value)
        recorded.tensors[name] = array
        if carrier:
            recorded.dtypes[name] = carrier
    not_recorded = []
    for name, column in output.non_tensor_batch.items():
        values = column.tolist()
        try:
            json.dumps(values)
        except TypeError:
            not_recorded.append(name)
            continue
        recorded.values[name] = values
        if column.dtype != object:
            recorded.value_dtypes[name] = str(column.dtype)
    meta = {k: v for k, v in output.meta_info.items() if k not in _VOLATILE}
    recorded.meta = {"meta_info": plain(meta), "not_recorded": sorted(not_recorded)}
    recorded.samples = _samples(step, identities(prompts), output, tokenizer)
    return recorded


@functools.cache
def tokenizer(path: str) -> Any:
    """A model's tokenizer, loaded once."""
    from verl.utils import hf_tokenizer

    return hf_tokenizer(path)


def plain(value: Any) -> Any:
    """The value as JSON holds it; what has no JSON form as its text."""

    def convert(item: Any) -> Any:
        return item.tolist() if hasattr(item, "tolist") else str(item)

    return json.loads(json.dumps(value, default=convert))


def sampling(config: Any) -> dict[str, Any]:
    """How the engine sampled, and of which distribution its log-probs are."""
    rollout = config.actor_rollout_ref.rollout
    keys = ("name", "temperature", "top_p", "top_k", "n", "response_length", "do_sample", "dtype")
    found = {key: rollout.get(key) for key in keys}
    found["engine"] = found.pop("name")
    # what the engine's log-probs are of: the model's distribution, or the one it sampled from
    kind = "processed" if found["engine"] == engines.CPU else rollout.get("logprobs_mode")
    found["logprobs"] = kind or "unknown"
    return found


def _to_numpy(value: torch.Tensor) -> tuple[np.ndarray | Ragged, str | None]:
    value = value.detach().cpu()
    carrier, bits = _TORCH_CARRIERS.get(value.dtype, (None, value.dtype))
    if value.is_nested:
        return Ragged.from_rows([row.view(bits).numpy() for row in value.unbind()]), carrier
    return value.contiguous().view(bits).numpy(), carrier


def _samples(step: int, prompts: list[str], output: DataProto, tokenizer: Any) -> list[Sample]:
    batch = output.batch
    width = batch["prompts"].shape[1]
    mask = batch["attention_mask"].bool()
    rewards = batch["rm_scores"].sum(dim=-1) if "rm_scores" in batch.keys() else None  # noqa: SIM118
    samples = []
    for row, (id, identity) in enumerate(zip(sample_ids(step, prompts), prompts, strict=True)):
        prompt = batch["prompts"][row][mask[row, :width]].tolist()
        response = batch["responses"][row][mask[row, width:]].tolist()
        samples.append(
            Sample.build(
                id,
                identity,
                prompt,
                response,
                prompt_text=tokenizer.decode(prompt),
                response_text=tokenizer.decode(response),
                reward=None if rewards is None else float(rewards[row]),
            )
        )
    return samples


def to_batch(recorded: Rollouts, prompts: DataProto, source: str) -> DataProto:
    """The recorded rollouts in the shape generation returns them.

    Raises:
        ReplayError: the batch sizes or any prompt differ, and the message names the rows; or the
            newer trainer recorded them, whose rows have no order.
    """
    if recorded.meta.get("source") == QUEUE:
        raise ReplayError(
            f"{source} was recorded on verl's newer trainer, whose rows have neither padding nor "
            "an order; set trainer.use_v1=true to replay it"
        )
    _check_prompts(recorded, prompts, source)
    tensors = {name: to_torch(recorded, name) for name in recorded.tensors}
    columns: dict[str, np.ndarray] = {}
    for name, values in recorded.values.items():
        if name in prompts.non_tensor_batch:
            columns[name] = prompts.non_tensor_batch[name]
        elif name in recorded.value_dtypes:
            columns[name] = np.array(values, dtype=recorded.value_dtypes[name])
        else:
            column = np.empty(len(values), dtype=object)
            column[:] = values
            columns[name] = column
    if recorded.meta.get("source") == vendor.SOURCE:
        _complete(tensors, columns, len(recorded))
    meta = dict(recorded.meta.get("meta_info", {}))
    return DataProto(
        batch=TensorDict(tensors, batch_size=len(recorded)),
        non_tensor_batch=columns,
        meta_info={**meta, "timing": {}},
    )


def _complete(tensors: dict[str, torch.Tensor], columns: dict[str, np.ndarray], rows: int) -> None:
    """Add what the trainer needs and key data lack: text-only samples of one turn."""
    width = tensors["responses"].shape[1]
    tensors["response_mask"] = tensors["attention_mask"][:, -width:].clone()
    columns["__num_turns__"] = np.full(rows, 2, dtype=np.int32)
    none = np.empty(rows, dtype=object)
    none[:] = [{} for _ in range(rows)]
    columns["multi_modal_inputs"] = none


def _check_prompts(recorded: Rollouts, prompts: DataProto, source: str) -> None:
    matching.require_size(len(recorded), len(prompts), source)
    if not all(sample.prompt_identity for sample in recorded.samples):
        _check_messages(recorded, prompts, source)
        return _check_tokens(recorded, prompts, source)
    differing = [
        row
        for row, (sample, found) in enumerate(
            zip(recorded.samples, identities(prompts), strict=True)
        )
        if sample.prompt_identity != found
    ]
    matching.require_same(differing, len(recorded), source)
    return None


def _check_messages(recorded: Rollouts, prompts: DataProto, source: str) -> None:
    """What verl saved itself has the messages that a prompt was made of."""
    messages, asked = recorded.values.get(_MESSAGES), prompts.non_tensor_batch.get(_MESSAGES)
    if messages is None or asked is None:
        return
    differing = [
        row
        for row, (one, other) in enumerate(zip(messages, asked.tolist(), strict=True))
        if plain(one) != plain(other)
    ]
    matching.require_same(differing, len(recorded), source)


def _check_tokens(recorded: Rollouts, prompts: DataProto, source: str) -> None:
    """Dumps of the vendor's tool have token ids only; nothing else of a prompt can be checked."""
    if "input_ids" not in (prompts.batch.keys() if prompts.batch is not None else ()):
        return
    width = recorded.tensors["prompts"].shape[1]  # type: ignore[union-attr]
    found = prompts.batch["input_ids"][:, -width:].numpy()
    differing = np.flatnonzero((found != recorded.tensors["prompts"]).any(axis=1)).tolist()
    if differing:
        raise ReplayError(
            f"the prompt tokens of rows {matching.some(differing)} are not those recorded in "
            f"{source}"
        )


def to_torch(recorded: Rollouts, name: str) -> torch.Tensor:
    """A recorded tensor in its true element type; jagged where its rows are ragged."""
    value = recorded.tensors[name]
    carrier = recorded.dtypes.get(name)
    target = getattr(torch, carrier) if carrier in CARRIERS else None
    if isinstance(value, Ragged):
        rows = [torch.from_numpy(value.row(i).copy()) for i in range(len(value))]
        rows = [row.view(target) if target else row for row in rows]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tensor = torch.from_numpy(value.copy())
    return tensor.view(target) if target else tensor


def recompute_rewards(workers: list[Any] | None, prompts: DataProto, output: DataProto) -> None:
    """Replace the recorded rewards by those this run's own reward workers compute.

    Raises:
        ReplayError: this configuration has no reward workers.
    """
    data = DataProto(
        batch=output.batch.clone(recurse=False),
        non_tensor_batch={**output.non_tensor_batch, **prompts.non_tensor_batch},
    )
    rewards = scores(workers, [data.slice(row, row + 1) for row in range(len(data))])
    found = torch.zeros_like(output.batch["responses"], dtype=torch.float32)
    width = output.batch["prompts"].shape[1]
    for row, reward in enumerate(rewards):
        # verl puts a sample's score on its last valid response token
        last = int(output.batch["attention_mask"][row, width:].sum()) - 1
        found[row, max(last, 0)] = reward
    output.batch["rm_scores"] = found


def scores(workers: list[Any] | None, samples: list[DataProto]) -> list[float]:
    """What this run's reward workers give to each sample (a batch of one row).

    Raises:
        ReplayError: this configuration has no reward workers.
    """
    if not workers:
        raise ReplayError(
            "recompute_rewards is set, but this configuration has no reward workers; leave it off "
            "to use the recorded rewards"
        )

    async def ask() -> list[dict[str, Any]]:
        pending = [
            workers[row % len(workers)].compute_score.remote(sample)
            for row, sample in enumerate(samples)
        ]
        return list(await asyncio.gather(*pending))

    return [float(result["reward_score"]) for result in asyncio.run(ask())]
