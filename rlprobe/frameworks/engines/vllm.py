"""vLLM and vLLM-Ascend: ``execute_model`` of the model runners, and the sampler's choice.

Both runners of vLLM are wrapped (the newer is ``vllm.v1.worker.gpu.model_runner``), and with them
vLLM-Ascend's, which are their subclasses. The model is looked up at every forward and hooks live
for one forward, so that loading, reloading and weight updates need no care.

Written against vLLM 0.18 to 0.33 and vLLM-Ascend 0.18 and 0.23; contract-tested, not run here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlprobe.errors import HookError
from rlprobe.frameworks.engines import forcing, handover, marks
from rlprobe.frameworks.engines.eager import without_dynamo
from rlprobe.frameworks.engines.forwards import Forwards, Request
from rlprobe.frameworks.wrap import Around, wrap_family

CLASS = "GPUModelRunner"
#: Method of the runner that samples, and the class that chooses.
SAMPLE, SAMPLER = "_sample", "Sampler"

_forwards = Forwards("vllm")


def patch(module: ModuleType) -> None:
    """Wrap the runner of a module.

    Raises:
        HookError: it has none, or not with the methods that are wrapped.
    """
    runner = getattr(module, CLASS, None)
    if runner is None:
        raise HookError(f"{module.__name__} has no {CLASS}; this vLLM cannot be dumped")
    hooks: dict[str, Around] = {
        "load_model": around_load_model,
        "execute_model": around_execute_model,
    }
    if callable(getattr(runner, SAMPLE, None)):  # the newer runner has another sampler
        hooks[SAMPLE] = around_sample
    wrap_family(runner, hooks, framework="vllm")


def patch_sampler(module: ModuleType) -> None:
    """Wrap ``Sampler.sample``: the place where a token is chosen, before its log-prob is taken.

    Raises:
        HookError: there is none.
    """
    sampler = getattr(module, SAMPLER, None)
    if sampler is None:
        raise HookError(f"{module.__name__} has no {SAMPLER}; this vLLM cannot be led")
    wrap_family(sampler, {"sample": around_choice}, framework="vllm")


def around_load_model(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Refuse an engine whose graphs would hide the modules, before it loads anything."""
    if handover.dumps():
        if not self.vllm_config.model_config.enforce_eager:
            raise HookError(
                "vLLM replays graphs, which run no hooks; set "
                "actor_rollout_ref.rollout.enforce_eager=true"
            )
        without_dynamo()
    return original(self, *args, **kwargs)


def around_execute_model(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dump a forward that a marked request asks for; a dummy run has none."""
    output = kwargs.get("scheduler_output", args[0] if args else None)
    return _forwards.run(
        getattr(self, "model", None),
        lambda: _noted(self, _requests(self, output) if handover.dumps() else _marked(output)),
        lambda: original(self, *args, **kwargs),
    )


def _noted(runner: Any, requests: list[Request]) -> list[Request]:
    """The requests, of which the sampler will want to know which token each is at."""
    runner._rlprobe_requests = requests
    return requests


def around_sample(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Sample; of a request that is led through a response, the token of the response."""
    _next[:] = [_forced(self, request) for request in getattr(self, "_rlprobe_requests", ())]
    try:
        return original(self, *args, **kwargs)
    finally:
        _next.clear()


#: The token of each request of the batch that is sampled now; None: what the sampler draws.
_next: list[int | None] = []


def _forced(runner: Any, request: Request) -> int | None:
    mark = marks.find(request.id)
    if mark is None or mark.phase != forcing.DECODE:
        return None
    given = runner.requests[request.id].sampling_params.extra_args or {}
    tokens = given.get(forcing.KEY) or ()
    return int(tokens[request.token]) if request.token < len(tokens) else None


def around_choice(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Draw, and put the token of the response in the place of the one that was drawn.

    Log-probs are taken afterwards, of the distribution that was drawn from: temperature and
    everything else that the sampler does are in them.
    """
    sampled, processed = original(self, *args, **kwargs)
    for row, token in enumerate(_next):
        if token is not None:
            sampled[row] = token
    return sampled, processed


def _marked(output: Any) -> list[Request]:
    """Requests that ask for the weights alone, whatever token each is at."""
    return [Request(name, 0) for name in output.num_scheduled_tokens if marks.marked(name)]


def _requests(runner: Any, output: Any) -> list[Request]:
    """The requests of a forward, and the token each will have when it is done.

    vLLM says a request's prompt once, when it is new, and afterwards how many of its tokens have
    been computed; both are kept per runner.
    """
    prompts: dict[str, int] = runner.__dict__.setdefault("_rlprobe_prompts", {})
    for done in output.finished_req_ids:
        prompts.pop(done, None)
    computed: dict[str, int] = {}
    for new in output.scheduled_new_reqs:
        prompts[new.req_id] = len(new.prompt_token_ids or ())
        computed[new.req_id] = new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    found = []
    for request, tokens in output.num_scheduled_tokens.items():
        if request not in prompts or request not in computed:
            continue  # of a dummy run, or from before the hooks
        beyond = computed[request] + tokens - prompts[request]
        found.append(Request(request, max(0, beyond)))
    return found
