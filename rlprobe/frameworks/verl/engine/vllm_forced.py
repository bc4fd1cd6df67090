"""verl's vLLM server, led through a recorded response.

Two requests of a sample, alone and marked: its whole as a prompt whose log-probs are asked for, and
its prompt with the response's first tokens as what the sampler has to choose
(:func:`rlprobe.frameworks.engines.vllm.around_choice`). vLLM gives a prompt's log-probs of the
model's own distribution, and a sampled token's of the one that it was drawn from where verl asks
for those (``logprobs_mode: processed_logprobs``), with its temperature.

Written against verl 0.9.1 and vLLM 0.31.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from rlprobe.capture.session import Session
from rlprobe.errors import ReplayError
from rlprobe.frameworks.engines import handover, marks
from rlprobe.frameworks.engines.forcing import DECODE, KEY, PREFILL, Answer, Asked, Scores
from rlprobe.frameworks.verl import control

#: Of these many likeliest tokens log-probs are asked for.
_TWO = 2


async def led(
    session: Session, server: Any, lock: asyncio.Lock, call: Mapping[str, Any], asked: Asked
) -> Any:
    """Lead the server's engine through a sample, nothing else beside it.

    Args:
        session: this run's.
        server: verl's ``vLLMHttpServer``.
        lock: one request at a time.
        call: arguments of its ``generate``.
        asked: the sample.

    Raises:
        ReplayError: the engine ran or drew tokens of its own, or gave up.
    """
    from verl.workers.rollout.replica import TokenOutput

    prompt = [int(token) for token in call["prompt_ids"]]
    temperature = call["sampling_params"].get("temperature", 1.0)
    whole = [*prompt, *asked.response]
    # an engine has to have room for a token more
    whole = whole[: int(server.config.max_model_len) - 1]
    async with lock:
        final = await _answer(server, PREFILL, asked, whole, prompt_logprobs=_TWO, max_tokens=1)
        prefill = _scores(final.prompt_logprobs[len(prompt) :], whole[len(prompt) :])
        tokens = asked.response[: asked.tokens]
        decode = None
        if tokens:
            decode = await _answer(
                server, DECODE, asked, prompt,
                logprobs=_TWO, max_tokens=len(tokens), temperature=temperature, ignore_eos=True,
                extra_args={KEY: tokens},
            )  # fmt: skip
    drawn = [] if decode is None else [int(token) for token in decode.outputs[0].token_ids]
    if drawn != tokens:
        raise ReplayError(
            f"generation: compare: vLLM drew {drawn} where the response has {tokens}: rlprobe's "
            "hook is not in its sampler (the newer model runner has another one); set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or generation: replay"
        )
    handover.joined(session, int(server.replica_rank), _mark(server, DECODE, asked).request,
                    asked.sample)  # fmt: skip
    answer = Answer(prefill, _scores([] if decode is None else decode.outputs[0].logprobs, tokens))
    return TokenOutput(token_ids=[], extra_fields={KEY: answer.as_dict()})


def _mark(server: Any, phase: str, asked: Asked) -> marks.Mark:
    step, trainer_step = control.step()
    return marks.Mark(step, trainer_step, int(server.replica_rank), asked.number, phase)


async def _answer(server: Any, phase: str, asked: Asked, tokens: list[int], **sampling: Any) -> Any:
    """vLLM's last output for a marked request."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    final = None
    async for output in server.engine.generate(
        prompt=TokensPrompt(prompt_token_ids=tokens),
        sampling_params=SamplingParams(detokenize=False, **sampling),
        request_id=_mark(server, phase, asked).on(uuid4().hex),
        lora_request=await _adapter(server),
    ):
        final = output
    if final is None or not final.outputs:
        raise ReplayError(
            f"generation: compare: vLLM gave up sample {asked.sample[:19]} in its {phase}"
        )
    _require_same(final.prompt_token_ids, tokens, asked, phase)
    return final


def _require_same(ran: Sequence[int], sent: Sequence[int], asked: Asked, phase: str) -> None:
    """Log-probs are of the tokens that an engine ran: of others they compare with nothing.

    Raises:
        ReplayError: it ran others, or another number of them.
    """
    if [int(token) for token in ran] == list(sent):
        return
    places = zip(ran, sent, strict=False)
    first = next((i for i, (own, token) in enumerate(places) if own != token), len(sent))
    raise ReplayError(
        f"generation: compare: vLLM ran {len(ran)} tokens in the {phase} of sample "
        f"{asked.sample[:19]} where it was sent {len(sent)}, other ones from token {first} on: it, "
        "or a plugin of it, adds or changes tokens; what it generates is not of the recorded "
        "prompts either"
    )


async def _adapter(server: Any) -> Any:
    """The policy's adapter, where verl has it apart from the weights."""
    if not server.lora_as_adapter:
        return None
    from verl.workers.rollout.vllm_rollout import vllm_async_server as verl_server

    number = verl_server.VLLM_LORA_INT_ID
    if number not in await server.engine.list_loras():
        return None
    return verl_server.LoRARequest(
        lora_name=verl_server.VLLM_LORA_NAME,
        lora_int_id=number,
        lora_path=verl_server.VLLM_LORA_PATH,
    )


def _scores(given: Sequence[Mapping[int, Any]], tokens: Sequence[int]) -> Scores:
    """What vLLM says of each token: its own log-prob, and the likeliest two."""
    log_probs, choices, margins = [], [], []
    for found, token in zip(given, tokens, strict=True):
        best = sorted(found.items(), key=lambda item: -item[1].logprob)[:_TWO]
        log_probs.append(float(found[token].logprob))
        choices.append(int(best[0][0]))
        second = float(best[1][1].logprob) if len(best) > 1 else -math.inf
        margins.append(float(best[0][1].logprob) - second)
    return Scores(log_probs, choices, margins)
