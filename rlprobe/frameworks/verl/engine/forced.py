"""The CPU engine's part of leading an engine through recorded responses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from rlprobe.frameworks.engines.forcing import DECODE, PREFILL, PROMPT, Answer, Asked, Scores

#: Enters the stage for one forward, given its phase and the generated token that it gives.
Entered = Callable[[str, int], contextlib.AbstractContextManager[object]]


@torch.no_grad()
def led(
    model: nn.Module,
    prompt: list[int],
    asked: Asked,
    distribution: Callable[[torch.Tensor], torch.Tensor],
    entered: Entered,
) -> Answer:
    """Lead a transformers model through one sample.

    Args:
        model: with ``past_key_values``.
        prompt: its valid token ids.
        asked: the sample.
        distribution: from logits ``[rows, vocabulary]`` to the log-probs sampled from.
        entered: around each forward.
    """
    response = asked.response
    whole = torch.tensor([[*prompt, *response]])
    with entered(PREFILL, 0):
        logits = model(input_ids=whole, use_cache=True).logits[0, len(prompt) - 1 : -1]
    prefill = _scores(distribution(logits.float()), response)
    if not asked.tokens:
        return Answer(prefill, Scores([], [], []))
    rows = []
    current, cache = torch.tensor([prompt]), None
    for number, token in enumerate(response[: asked.tokens]):
        with entered(DECODE if number else PROMPT, number):
            result = model(input_ids=current, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        rows.append(result.logits[0, -1].float())
        current = torch.tensor([[token]])
    return Answer(prefill, _scores(distribution(torch.stack(rows)), response[: asked.tokens]))


def _scores(distribution: torch.Tensor, tokens: list[int]) -> Scores:
    chosen = distribution.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    best = distribution.topk(2, dim=-1)
    margins = best.values[:, 0] - best.values[:, 1]
    return Scores(chosen.tolist(), best.indices[:, 0].tolist(), margins.tolist())
