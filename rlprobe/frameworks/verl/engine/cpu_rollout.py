"""Generation on the CPU: plain transformers behind verl's server-replica interface.

Small and exact rather than fast. Each request draws from a generator of its own, seeded by the
configuration's seed, the weights' step, the prompt and a counter, so that a rollout does not depend
on the order in which requests arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from rlprobe import stages
from rlprobe.capture.recorder import Recorder, StageScope
from rlprobe.errors import RunError
from rlprobe.faults.declare import Site
from rlprobe.faults.plant import planted, reference_of
from rlprobe.frameworks.engines.forcing import FREE, KEY, PREFILL, Asked
from rlprobe.frameworks.engines.forwards import ROLE
from rlprobe.frameworks.verl import control
from rlprobe.frameworks.verl.engine import forced
from rlprobe.rollouts.digest import sample_digest

_DTYPES = {"float32": torch.float32, "fp32": torch.float32, "float64": torch.float64}


class CpuServer:
    """A Ray actor that holds one full copy of the policy and answers one request at a time."""

    def __init__(self, model_path: str, config: Any, replica_rank: int, attention: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._config = config
        self._rank = replica_rank
        self._step: int | None = None
        self._seen: dict[tuple[Any, ...], int] = {}
        #: Requests answered with these weights.
        self._requests = 0
        self._lock = asyncio.Lock()
        self._recorder: Recorder | None = None
        self._forced_recorder: Recorder | None = None
        model_config = AutoConfig.from_pretrained(model_path)
        model_config._attn_implementation = attention
        self._model = AutoModelForCausalLM.from_config(
            model_config, dtype=_DTYPES.get(config.dtype, torch.bfloat16)
        ).eval()
        self._eos = model_config.eos_token_id

    async def load_weights(self, named: list[tuple[str, torch.Tensor]], step: int | None) -> int:
        """Take over the policy's weights; returns how many tensors arrived."""
        state = {name: torch.as_tensor(value) for name, value in named}
        missing, unexpected = self._model.load_state_dict(state, strict=False)
        if missing or unexpected:
            # verl names weights as the checkpoint does, where experts are apart
            missing, unexpected = self._converted(state)
        if missing or unexpected:
            raise RunError(
                f"the policy's weights do not fit the rollout model: missing {missing[:3]}, "
                f"unexpected {unexpected[:3]}{_advice(unexpected)}"
            )
        self._step, self._seen, self._requests = step, {}, 0
        return len(state)

    def _converted(self, state: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
        """Load weights that need transformers' conversion of checkpoints."""
        model, found = type(self._model).from_pretrained(
            None,
            config=self._model.config,
            state_dict=state,
            dtype=self._model.dtype,
            output_loading_info=True,
        )
        self._model = model.eval()
        return sorted(found["missing_keys"]), sorted(found["unexpected_keys"])

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Answer one prompt of valid token ids."""
        if self._step is None:
            raise RunError("generation was asked for before the policy's weights arrived")
        # one at a time: captured forwards of two requests must not interleave
        async with self._lock:
            asked = Asked.of(sampling_params)
            if asked is not None:
                return self._led(list(prompt_ids), sampling_params, asked)
            return self._generate(
                request_id,
                list(prompt_ids),
                sampling_params,
                captured=not sampling_params.get(FREE),
            )

    def _generator(
        self, request_id: str, prompt_ids: list[int], asked: int | None
    ) -> torch.Generator:
        """Of a request, which may ask for a seed."""
        if asked is not None:
            return torch.Generator().manual_seed(asked)
        # under full_determinism verl numbers requests by row on the older trainer and calls every
        # one "det-0" on the newer: the count tells repetitions of a prompt apart there
        key = (self._step, request_id, tuple(prompt_ids))
        count = self._seen[key] = self._seen.get(key, -1) + 1
        # verl 0.8 has no seed of the engine's
        text = f"{getattr(self._config, 'seed', 0)}|{key}|{count}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def _generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        *,
        captured: bool,
    ) -> TokenOutput:
        generator = self._generator(request_id, prompt_ids, sampling.get("seed"))
        current, cache = torch.tensor([prompt_ids]), None
        tokens: list[int] = []
        log_probs: list[float] = []
        reason = "length"
        with self._captured() if captured else contextlib.nullcontext() as scope:
            for _ in range(sampling.get("max_tokens") or self._config.response_length):
                result = self._model(input_ids=current, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                distribution = _distribution(result.logits[0, -1].float(), sampling)
                if (sampling.get("temperature") or 0) > 0:
                    token = torch.multinomial(distribution.exp(), 1, generator=generator)
                else:
                    token = distribution.argmax(-1, keepdim=True)
                tokens.append(int(token))
                log_probs.append(float(distribution[token]))
                if tokens[-1] == self._eos and not self._config.ignore_eos:
                    reason = "completed"
                    break
                current = token.view(1, 1)
            if scope is not None:
                # tells which sample each captured request became
                digest = sample_digest(prompt_ids, tokens)
                scope.samples([digest])
                scope.generated.append(digest)
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs if sampling.get("logprobs") else None,
            stop_reason=reason,
            extra_fields={"global_steps": self._step},
        )

    def _led(self, prompt_ids: list[int], sampling: dict[str, Any], asked: Asked) -> TokenOutput:
        """Lead the model through a recorded response, each forward an entry of the stage."""
        session = control.session()
        if session is None:
            raise RunError("an engine is led through responses in a run of an alignment only")
        if self._forced_recorder is None:
            self._forced_recorder = Recorder(
                session, role=ROLE, rank=self._rank, world_size=1, layout={"backend": "cpu"}
            )
        recorder, (step, trainer_step) = self._forced_recorder, control.step()

        @contextlib.contextmanager
        def entered(phase: str, token: int) -> Iterator[None]:
            with recorder.stage(stages.FORCED, step, trainer_step, self._model) as scope:
                scope.micro_step(asked.number)
                scope.forward = (phase, token)
                scope.generated.append(asked.sample)
                if phase == PREFILL:
                    scope.samples([asked.sample])
                yield

        site = Site(
            role="actor",
            stage=stages.FORCED,
            step=step,
            model=self._model,
            optimizer=None,
            batch=asked,
            rank=self._rank,
            world_size=1,
            config=self._config,
            strength=session.fault_strength,
        )
        # of the policy alone: what is drawn from the rest of it is generation's business
        plain = {"temperature": sampling.get("temperature", 1.0)}
        with planted(reference_of(session.fault), site, session.fault_step):
            answer = forced.led(
                self._model, prompt_ids, asked, lambda logits: _distribution(logits, plain), entered
            )
        return TokenOutput(token_ids=[], extra_fields={KEY: answer.as_dict()})

    @contextlib.contextmanager
    def _captured(self) -> Iterator[StageScope | None]:
        """The generate stage around one request; the engine picks the tokens of the range."""
        session = control.session()
        if session is None or session.capture.token_range is None:
            yield None
            return
        if self._recorder is None:
            self._recorder = Recorder(
                session, role="actor", rank=self._rank, world_size=1, layout={"backend": "cpu"}
            )
        step, trainer_step = control.step()
        with self._recorder.stage(stages.GENERATE, step, trainer_step, self._model) as scope:
            scope.micro_step(self._requests)
            self._requests += 1
            yield scope

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Memory management and profiling that a CPU does not need."""

    wake_up = sleep = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = _nothing


def _advice(unexpected: list[str]) -> str:
    if any(".base_layer." in name for name in unexpected):
        return (
            "; the CPU rollout takes adapters merged: set actor_rollout_ref.model.lora.merge=true"
        )
    return ""


def _distribution(logits: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Log-probs [..., vocabulary] that a token is drawn from: temperature, top-k, top-p.

    Top-k and top-p are of one token's logits, [vocabulary].
    """
    temperature = sampling.get("temperature", 1.0) or 0
    if temperature > 0:
        logits = logits / temperature
        top_k = sampling.get("top_k") or -1
        if top_k > 0:
            kept = logits.topk(min(top_k, logits.numel())).values
            logits = logits.masked_fill(logits < kept[-1], float("-inf"))
        top_p = sampling.get("top_p", 1.0)
        if top_p < 1.0:
            ranked, index = logits.sort(descending=True)
            mass = ranked.softmax(-1)
            logits = logits.index_fill(0, index[mass.cumsum(-1) - mass > top_p], float("-inf"))
    return logits.log_softmax(-1)


def _server_name(replica_rank: int) -> str:
    return f"rlprobe_cpu_server_{replica_rank}"


class CpuReplica(RolloutReplica):
    """Starts one :class:`CpuServer`."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise RunError(
                f"the CPU rollout runs one process a replica, not {self.world_size}; set "
                "tensor, data and pipeline parallel sizes of the rollout to 1"
            )
        model = self.model_config
        path = model.local_path if hasattr(model, "local_path") else model["path"]
        override = model.get("override_config") or {}
        name = _server_name(self.replica_rank)
        server = (
            ray.remote(num_cpus=0)(CpuServer)
            .options(name=name, max_concurrency=self.max_concurrency)
            .remote(
                path,
                self.config,
                self.replica_rank,
                override.get("attn_implementation", "eager"),
            )
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"ray://{name}"


class CpuAdapter(BaseRollout):
    """The training worker's side: pushes the current policy to the server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        self._replica_rank = rank if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def resume(self, tags: Any) -> None:
        """The server is always awake."""

    async def release(self) -> None:
        """Nothing to free."""

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: Any = None, **_: Any
    ) -> None:
        # every rank drains the generator: materialising a shard is a collective
        named = [(name, value.detach().to("cpu", copy=True)) for name, value in weights]
        if self._server is None:
            self._server = ray.get_actor(_server_name(self._replica_rank))
        await self._server.load_weights.remote(named, global_steps)
