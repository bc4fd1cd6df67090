"""A step of verl's newer trainer from recorded rollouts.

Rows are put into TransferQueue as the agent loop would have put them, under keys made of the
prompts' new ids. Nothing is generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rlprobe.errors import ReplayError
from rlprobe.frameworks.verl.replay import rollouts, transfer
from rlprobe.rollouts import Ragged, Rollouts, matching, prompt_digest

#: Tensors of a sample with one entry a response token, and those with one a token of the whole.
_OF_RESPONSE = ("response_mask", "rollout_log_probs", "rm_scores")
_OF_SEQUENCE = ("routed_experts",)
#: Entries of a prompt that steer generation and are not the sample's.
_STEERING = ("agent_name", "validate", "__rollout_n__", "__do_sample__")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def put(recorded: Rollouts, prompts: Any, source: str, manager: Any, recompute: bool) -> None:
    """Answer the prompts of a step with recorded rollouts.

    Args:
        recorded: the step that is replayed.
        prompts: the trainer's ``TensorDict``, a row a prompt.
        source: where the recording lies, for messages.
        manager: verl's agent-loop manager (its configuration and reward workers).
        recompute: whether this run's reward workers score the samples again.

    Raises:
        ReplayError: another batch size, prompts that were not recorded, samples with images, a
            trainer that does not wait for its rollouts, or rewards that nobody can compute.
    """
    import transfer_queue

    mode = manager.config.trainer.v1.trainer_mode
    if mode != "sync":
        raise ReplayError(
            f"trainer.v1.trainer_mode is {mode!r}, which asks for rollouts ahead of the step they "
            "are for; recorded rollouts can be replayed with 'sync' only"
        )
    rows = _prompt_rows(prompts)
    _require_text(rows, recorded, source)
    repeats = [
        int(row.get("__rollout_n__", manager.config.actor_rollout_ref.rollout.n)) for row in rows
    ]
    matched = _match(recorded, rows, repeats, source, manager.config)
    fields = _Fields(recorded, source)
    keys, samples, tags = [], [], []
    for prompt, sessions in zip(rows, matched, strict=True):
        for number, session in enumerate(sessions):
            for output, row in enumerate(session):
                sample = fields.sample(row)
                sample |= {k: v for k, v in prompt.items() if k not in _STEERING}
                sample["session_id"] = number
                keys.append(f"{prompt['uid']}_{number}_{output}")
                samples.append(sample)
                tags.append(_tag(sample))
    if recompute or "rm_scores" not in samples[0]:
        _score(manager, samples, recompute)
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    transfer_queue.kv_batch_put(
        keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(samples), tags=tags
    )
    transfer_queue.kv_batch_put(
        keys=[prompt["uid"] for prompt in rows],
        partition_id="train",
        tags=[
            {"is_prompt": True, "status": "finished", "global_steps": prompt["global_steps"]}
            for prompt in rows
        ],
    )


def _prompt_rows(prompts: Any) -> list[dict[str, Any]]:
    """The columns of the prompts by row; a value they share is every row's."""
    columns: dict[str, list[Any]] = {}
    for name in prompts.keys():  # noqa: SIM118
        value = prompts.get(name)
        if isinstance(value, torch.Tensor):
            columns[name] = list(value.unbind(0))
        else:
            columns[name] = transfer.column(value, len(prompts))
    return [{name: column[row] for name, column in columns.items()} for row in range(len(prompts))]


def _require_text(rows: list[dict[str, Any]], recorded: Rollouts, source: str) -> None:
    parts = (
        part.get("type")
        for row in rows
        for message in row.get("raw_prompt", ())
        if isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
        if isinstance(part, dict)
    )
    if any(part in _MEDIA for part in parts) or any(name in rows[0] for name in _MEDIA):
        raise ReplayError(
            f"{source}: the prompts of this step have images, sound or video, which recordings do "
            "not hold; such rollouts cannot be replayed"
        )


def _match(
    recorded: Rollouts, rows: list[dict[str, Any]], repeats: list[int], source: str, config: Any
) -> list[list[list[int]]]:
    if all(sample.prompt_identity for sample in recorded.samples):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        asked = rollouts.identities_of(columns.get, len(rows), "the batch")
        keys = [sample.prompt_identity for sample in recorded.samples]
    else:
        # key data of the vendor's tool have token ids and no text
        asked = [prompt_digest(ids) for ids in _tokens(rows, config)]
        keys = [sample.prompt_digest for sample in recorded.samples]
    return matching.match(recorded, keys, asked, repeats, source)


def _tokens(rows: list[dict[str, Any]], config: Any) -> Iterator[list[int]]:
    """Token ids of each prompt, as a single-turn agent loop makes them."""
    tokenizer = rollouts.tokenizer(config.actor_rollout_ref.model.path)
    longest = config.actor_rollout_ref.rollout.prompt_length
    for row in rows:
        found = tokenizer.apply_chat_template(
            list(row["raw_prompt"]),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **config.data.get("apply_chat_template_kwargs", {}),
        )
        yield list(found)[-longest:]


class _Fields:
    """What the agent loop would have stored of each recorded sample."""

    def __init__(self, recorded: Rollouts, source: str) -> None:
        self._values = recorded.values
        self._reward_keys = (recorded.meta.get("meta_info") or {}).get("reward_extra_keys", ())
        tensors = {
            name: rollouts.to_torch(recorded, name)
            for name in ("prompts", "responses", *_OF_RESPONSE, *_OF_SEQUENCE)
            if name in recorded.tensors
        }
        lacking = [name for name in ("prompts", "responses") if name not in tensors]
        if lacking:
            raise ReplayError(f"{source} has no {', '.join(lacking)}")
        self._rows = {name: list(value.unbind(0)) for name, value in tensors.items()}
        self._mask: list[torch.Tensor] | None = None
        if not isinstance(recorded.tensors["prompts"], Ragged):
            if "attention_mask" not in recorded.tensors:
                raise ReplayError(f"{source} has padded prompts and no attention_mask")
            mask = rollouts.to_torch(recorded, "attention_mask").bool()
            self._mask = list(mask.unbind(0))

    def sample(self, row: int) -> dict[str, Any]:
        """One sample's entries, without its prompt's columns."""
        found = {name: rows[row] for name, rows in self._rows.items()}
        if self._mask is not None:
            mask, width = self._mask[row], len(found["prompts"])
            for name in found:
                own = mask[:width] if name == "prompts" else mask[width:]
                found[name] = found[name][mask if name in _OF_SEQUENCE else own]
        prompt, response = found["prompts"].long(), found["responses"].long()
        response_mask = found.get("response_mask", torch.ones_like(response)).long()
        found |= {
            "prompts": prompt,
            "responses": response,
            "response_mask": response_mask,
            "loss_mask": response_mask,
            "input_ids": torch.cat([prompt, response]),
            "position_ids": torch.arange(len(prompt) + len(response)),
            "multi_modal_inputs": {},
            "num_turns": self._turns(row),
            "extra_fields": self._extra(row),
        }
        return found

    def _turns(self, row: int) -> int:
        for name in ("num_turns", "__num_turns__"):
            if name in self._values:
                return int(self._values[name][row])
        return 2  # a question and its answer

    def _extra(self, row: int) -> dict[str, Any]:
        if "extra_fields" in self._values:
            return dict(self._values["extra_fields"][row])
        keys = [key for key in self._reward_keys if key in self._values]
        return {"reward_extra_info": {key: self._values[key][row] for key in keys}}


def _tag(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample's tag in the queue; its weights are those of the step before, as in a live run."""
    prompt, response = len(sample["prompts"]), len(sample["responses"])
    weights = int(sample["global_steps"]) - 1
    sample["extra_fields"] |= {"min_global_steps": weights, "max_global_steps": weights}
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": sample["global_steps"],
        "min_global_steps": weights,
        "max_global_steps": weights,
    }


def _score(manager: Any, samples: list[dict[str, Any]], recompute: bool) -> None:
    """Let this run's reward workers score the samples.

    Without workers a reward model beside the trainer does it later, on its own.
    """
    workers = manager.reward_loop_worker_handles
    if workers is None and not recompute:
        return
    scores = rollouts.scores(workers, [_reward_batch(sample) for sample in samples])
    for sample, score in zip(samples, scores, strict=True):
        sample["rm_scores"] = torch.zeros(len(sample["responses"]))
        sample["rm_scores"][-1] = score


def _reward_batch(sample: dict[str, Any]) -> Any:
    from tensordict import TensorDict
    from verl import DataProto

    tensors = {
        name: sample[name].unsqueeze(0)
        for name in ("prompts", "responses", "input_ids", "position_ids")
    }
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    columns = {}
    for name, value in sample.items():
        if isinstance(value, torch.Tensor):
            continue
        columns[name] = np.empty(1, dtype=object)
        columns[name][0] = value
    columns["__num_turns__"] = columns.pop("num_turns")
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=columns)
