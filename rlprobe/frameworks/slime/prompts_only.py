"""``PROMPTS_ONLY=1``: the engine's prefill and slime's log-probs over the same tokens.

In this mode (:mod:`rlprobe.frameworks.prompts`) the engine generates one token, which is thrown
away, and returns the log-probs of the *prompt's* tokens; the sample then is the prompt alone, with
every token but the first as its response. So ``old_log_prob`` runs over exactly the tokens the
prefill ran over, its log-probs stand beside the engine's (``rollout_log_probs``), and nothing in
slime's loss or data code is touched.

It only means something if one prompt is one forward on both sides; :func:`problems` lists what
stands in the way.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rlprobe.errors import ConfigError, HookError
from rlprobe.frameworks.prompts import ENV, wanted

#: What the engine answered to the request that the current task made.
_answer: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "rlprobe_answer", default=None
)


def problems(args: Any) -> list[str]:
    """Arguments under which prefill and training forward would not see the same; empty if none."""
    checks: list[tuple[str, Any, Any, str]] = [
        ("data_pad_size_multiplier", 128, 1, "padding adds tokens to the training forward"),
        ("micro_batch_size", 1, 1, "one prompt must be one training forward"),
        ("use_dynamic_batch_size", False, False, "it packs several prompts into one forward"),
        ("balance_data", False, False, "it changes the order of the prompts"),
        ("context_parallel_size", 1, 1, "a context-parallel rank sees a part of the prompt"),
        ("pipeline_model_parallel_size", 1, 1, "a pipeline stage holds a part of the layers"),
        ("sglang_max_running_requests", None, 1, "one prompt must be one prefill"),
        ("sglang_disable_radix_cache", False, True, "a cached prefix is not computed again"),
        ("partial_rollout", False, False, "a rollout continued later is no prefill of its prompt"),
        ("custom_generate_function_path", None, None, "it does not go through slime's generate"),
    ]
    found = []
    for name, default, needed, why in checks:
        value = getattr(args, name, default)
        if value != needed:
            found.append(f"--{name.replace('_', '-')}: found {value!r}, needed {needed!r} ({why})")
    chunk = getattr(args, "sglang_chunked_prefill_size", None)
    if chunk != -1:
        found.append(
            f"--sglang-chunked-prefill-size: found {chunk!r}, needed -1 (a prefill in chunks is "
            "several forwards)"
        )
    engine = getattr(args, "rollout_num_gpus_per_engine", 1)
    training = getattr(args, "tensor_model_parallel_size", 1)
    if engine != training:
        found.append(
            f"--rollout-num-gpus-per-engine {engine} and --tensor-model-parallel-size {training}: "
            "needed equal (shards of different widths have no common record)"
        )
    return found


def require(args: Any) -> None:
    """Refuse arguments under which the mode would compare different things.

    Raises:
        ConfigError: lists each argument, what was found, what is needed and why.
    """
    found = problems(args)
    if found:
        raise ConfigError(f"{ENV}=1: " + "; ".join(found))


def patch_manager(module: ModuleType) -> None:
    """Check the arguments, and ask for one token, before any engine starts."""
    from rlprobe.frameworks.wrap import plain_class, wrap_method

    wrap_method(plain_class(module.RolloutManager), "__init__", around_manager_init)


def around_manager_init(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rollout manager is built from slime's parsed arguments."""
    import os

    configured: Any = kwargs.get("args", args[0] if args else None)
    if wanted(os.environ) and not getattr(configured, "debug_train_only", False):
        require(configured)
        configured.rollout_max_response_len = 1
    return original(self, *args, **kwargs)


def patch_generation(module: ModuleType) -> None:
    """Wrap slime's ``generate`` and the ``post`` it sends its request with.

    Raises:
        HookError: one of them does not exist in this version.
    """
    import os

    if not wanted(os.environ):
        return
    for name in ("generate", "post"):
        if not callable(getattr(module, name, None)):
            raise HookError(
                f"{ENV}=1: {module.__name__} has no function {name}; this version of slime "
                "generates in another way than rlprobe knows"
            )
    module.post = _asking_for_prompt(module.post)  # type: ignore[attr-defined]
    module.generate = _prompt_alone(module.generate)  # type: ignore[attr-defined]


def _asking_for_prompt(post: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(post)
    async def wrapper(url: str, *args: Any, **kwargs: Any) -> Any:
        if not url.endswith("/generate"):
            return await post(url, *args, **kwargs)
        payload: Any = kwargs.get("payload", args[0] if args else None)
        payload["logprob_start_len"] = 0
        payload["sampling_params"]["max_new_tokens"] = 1
        answer = await post(url, *args, **kwargs)
        _answer.set(answer)
        return answer

    return wrapper


def _prompt_alone(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    async def wrapper(args: Any, sample: Any, *more: Any, **kwargs: Any) -> Any:
        _answer.set(None)
        result = await generate(args, sample, *more, **kwargs)
        answer = _answer.get()
        if answer is None:
            raise HookError(f"{ENV}=1: slime generated a sample without asking the engine")
        return prompt_alone(result, answer["meta_info"])

    return wrapper


def prompt_alone(sample: Any, meta_info: Mapping[str, Any]) -> Any:
    """Make a generated sample the prompt alone; its response is every token but the first.

    Args:
        sample: slime's ``Sample`` after generation.
        meta_info: the engine's, with ``input_token_logprobs`` as ``(log-prob, token, text)`` per
            prompt token; the first has no log-prob.

    Raises:
        HookError: the engine's tokens are not the prompt's.
    """
    entries = meta_info.get("input_token_logprobs") or []
    cut = len(sample.tokens) - int(sample.response_length)
    prompt = [int(token) for token in sample.tokens[:cut]]
    ids = [int(entry[1]) for entry in entries]
    if ids != prompt or len(prompt) < 2:
        raise HookError(
            f"{ENV}=1: the engine returned log-probs of {len(ids)} tokens for a prompt of "
            f"{len(prompt)}; expected the prompt's own (at least two)"
        )
    sample.tokens = prompt
    sample.response_length = len(prompt) - 1
    sample.loss_mask = [1] * (len(prompt) - 1)
    sample.rollout_log_probs = [float(entry[0]) for entry in entries[1:]]
    return sample
