"""What several faults of this set are made of."""

import contextlib
import importlib
import sys

import torch

from rlprobe.faults.patching import swapped


def local(tensor):
    """This rank's own memory of a parameter, a gradient or a state."""
    return getattr(tensor, "_local_tensor", tensor)


def bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


def scores_of(module, query, key, mask, scaling):
    keys = key.repeat_interleave(module.num_key_value_groups, 1)
    scores = query @ keys.transpose(2, 3) * scaling
    return scores if mask is None else scores + mask


def summed(module, probabilities, value):
    values = value.repeat_interleave(module.num_key_value_groups, 1)
    return (probabilities.to(values.dtype) @ values).transpose(1, 2).contiguous(), probabilities


@contextlib.contextmanager
def rotary_of(module, rotate):
    """One attention module rotates by ``rotate(q, k, cos, sin)``."""
    file, right = sys.modules[type(module).__module__], module.forward

    def called(*args, **kwargs):
        with swapped(file, "apply_rotary_pos_emb", rotate):
            return right(*args, **kwargs)

    with swapped(module, "forward", called):
        yield


def log_probs(change):
    """verl's log-probs become ``change(right, logits, labels)``."""
    engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    right = engine.logprobs_from_logits

    def wrong(logits, labels, **kwargs):
        return change(right, logits, labels)

    return swapped(engine, "logprobs_from_logits", wrong)


def adam(change):
    """torch's Adam becomes ``change(right, params, grads, averages, squares, …)``."""
    file = importlib.import_module("torch.optim.adam")
    right = file.adam

    def wrong(*args, **kwargs):
        return change(right, *args, **kwargs)

    return swapped(file, "adam", wrong)


def stepped_anew(change):
    """Adam as it is, then each parameter by ``change(average, square, step, lr, settings)``."""

    def wrong(right, params, grads, averages, squares, most, steps, **kwargs):
        before = [local(p).clone() for p in params]
        right(params, grads, averages, squares, most, steps, **kwargs)
        lr = float(kwargs["lr"])
        with torch.no_grad():
            for p, old, m, v, step in zip(params, before, averages, squares, steps, strict=True):
                moved = change(local(m), local(v), float(local(step)), kwargs)
                local(p).copy_(old * (1 - lr * kwargs["weight_decay"]) - lr * moved)

    return adam(wrong)


def for_good(owner, name, change):
    """Replace what the trainer calls between two stages; a trial is a process of its own."""
    right = getattr(owner, name)
    if not getattr(right, "_planted", False):
        wrong = change(right)
        wrong._planted = True
        setattr(owner, name, wrong)


@contextlib.contextmanager
def other_numbers(parameter, change):
    """A parameter's own memory holds ``change(it)`` for the time of a stage."""
    memory = local(parameter).detach()
    kept = memory.clone()
    memory.copy_(change(kept))
    try:
        yield
    finally:
        memory.copy_(kept)
