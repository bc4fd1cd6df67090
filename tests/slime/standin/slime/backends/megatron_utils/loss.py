"""Log-probs, values, advantages and losses, as plain as they can be."""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region


def _response_part(output, batch, row):
    start = batch["total_lengths"][row] - batch["response_lengths"][row]
    return output[row, start - 1 : batch["total_lengths"][row] - 1]


def get_log_probs(logits, *, args, batch):
    found = []
    logits = gather_from_tensor_model_parallel_region(logits)
    for row, tokens in enumerate(batch["tokens"]):
        part = _response_part(logits, batch, row).float() / args.rollout_temperature
        ids = tokens[-len(part) :].unsqueeze(-1)
        found.append(torch.log_softmax(part, dim=-1).gather(-1, ids).squeeze(-1))
    return {"log_probs": found}


def get_values(logits, *, args, batch):
    rows = range(len(batch["tokens"]))
    return {"values": [_response_part(logits, batch, row).squeeze(-1) for row in rows]}


def compute_advantages_and_returns(args, rollout_data):
    advantages = []
    for row, reward in enumerate(rollout_data["rewards"]):
        values = rollout_data["values"][row] if "values" in rollout_data else None
        base = torch.zeros(rollout_data["response_lengths"][row]) if values is None else values
        advantages.append(reward - base)
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = [
        torch.full((n,), reward)
        for n, reward in zip(rollout_data["response_lengths"], rollout_data["rewards"], strict=True)
    ]


def loss_function(args, batch, num_microbatches, logits):
    found = (
        get_values(logits, args=args, batch=batch)["values"]
        if args.loss_type == "value_loss"
        else get_log_probs(logits, args=args, batch=batch)["log_probs"]
    )
    losses = []
    for row, new in enumerate(found):
        mask = batch["loss_masks"][row]
        if args.loss_type == "value_loss":
            each = (new - batch["returns"][row]) ** 2
        else:
            old = batch["log_probs"][row] if batch["log_probs"] is not None else new.detach()
            each = -torch.exp(new - old) * batch["advantages"][row]
            if args.use_kl_loss:
                each = each + 0.01 * (new - batch["ref_log_probs"][row]) ** 2
        losses.append((each * mask).sum() / mask.sum())
    loss = torch.stack(losses).mean()
    report = torch.stack([torch.tensor(float(len(losses))), loss.detach()])
    return loss, torch.tensor(1), {"keys": ["pg_loss"], "values": report}
