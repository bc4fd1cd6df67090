"""Around slime's rollout manager: rollouts recorded, or replaced by recorded ones, and the proof.

The manager is a Ray actor that exists once. slime's own debug flags do the work: a collecting run
saves each rollout, which becomes a file of ours; a replay writes each recorded rollout as the file
that this slime loads instead of generating, starts no engine, and checks what was loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlprobe import stages
from rlprobe.capture.session import ReplayOptions, Session
from rlprobe.errors import HookError, ReplayError
from rlprobe.frameworks import progress, proof
from rlprobe.frameworks import recorded as recorded_rollouts
from rlprobe.frameworks.slime import control, debug_data, metrics, plan, versions
from rlprobe.frameworks.slime.manager_paths import RECORDED, REPLAYED, template
from rlprobe.rollouts import Rollouts, hdf5, sample_digest

_generated = 0


def around_generate(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One rollout: its number is the step, its samples are recorded or replaced."""
    global _generated
    session = control.session()
    if session is None:
        return original(self, *args, **kwargs)
    rollout_id = int(kwargs.get("rollout_id", args[0] if args else 0))
    control.announce_first(rollout_id)
    metrics.enter(rollout_id)
    step = control.step(rollout_id)
    if session.replay is not None:
        _write_recorded(session, session.replay, self, step, rollout_id)
    else:
        progress.report(session, stages.GENERATE, step, rollout_id)
    result = original(self, *args, **kwargs)
    _generated += 1
    if session.replay is None:
        if session.collect_rollouts:
            _record(session, self.args, step, rollout_id)
        progress.report(session, stages.GENERATE, step, rollout_id, 0.0)
    return result


def _record(session: Session, args: Any, step: int, rollout_id: int) -> None:
    saved = getattr(args, "save_debug_rollout_data", None)
    if saved is None:
        raise HookError(
            "rollouts are to be recorded, but slime was started without --save-debug-rollout-data"
        )
    path = saved.format(rollout_id=rollout_id)
    _, samples = debug_data.read(path)
    recorded = debug_data.to_rollouts(
        samples, step=step, trainer_step=rollout_id, sampling=sampling_of(args)
    )
    hdf5.write(Path(session.side) / "rollouts" / f"step{step}.h5", recorded)
    # the recorded rollout has all of it; slime's copy is only on its way
    if Path(path).is_relative_to(Path(session.side) / RECORDED):
        Path(path).unlink()


def sampling_of(args: Any) -> dict[str, Any]:
    """How slime was told to sample."""
    names = {
        "temperature": "rollout_temperature",
        "top_p": "rollout_top_p",
        "top_k": "rollout_top_k",
        "n": "n_samples_per_prompt",
        "max_prompt_length": "rollout_max_prompt_len",
        "response_length": "rollout_max_response_len",
        "seed": "rollout_seed",
    }
    found = {key: getattr(args, name, None) for key, name in names.items()}
    # SGLang's output log-probs are those of the distribution it sampled from
    return {**found, "engine": "sglang", "logprobs": "processed"}


def _write_recorded(
    session: Session, options: ReplayOptions, manager: Any, step: int, rollout_id: int
) -> None:
    loaded = getattr(manager.args, "load_debug_rollout_data", None)
    expected = template(Path(session.side), REPLAYED)
    if loaded != expected:
        raise ReplayError(
            f"--load-debug-rollout-data: found {loaded!r}; this run replays recorded rollouts, "
            f"which slime reads from {expected!r}. A path without {{rollout_id}} would repeat one "
            "file at every step"
        )
    if getattr(manager.args, "load_debug_rollout_data_subsample", None) is not None:
        raise ReplayError("--load-debug-rollout-data-subsample drops samples; leave it out")
    recorded, source = load_step(options, step)
    _check_prompts(recorded, manager, source)
    samples = debug_data.from_rollouts(recorded)
    debug_data.write(Path(expected.format(rollout_id=rollout_id)), rollout_id, samples)
    sys.stderr.write(
        f"rlprobe: step {step} (rollout {rollout_id}): {len(recorded)} samples replayed from "
        f"{source}\n"
    )


def load_step(options: ReplayOptions, step: int) -> tuple[Rollouts, str]:
    """The recorded rollouts that the replay's ``step`` takes, and where they lie.

    Raises:
        ReplayError: the directory holds no rollouts, or not the step that is wanted.
    """
    if (found := recorded_rollouts.load_step(options, step)) is None:
        raise ReplayError(
            f"no recorded rollouts in {options.path}: neither step{{N}}.h5 files nor rollouts/"
        )
    return found


def _check_prompts(recorded: Rollouts, manager: Any, source: str) -> None:
    """Every recorded prompt must be one of the data set that this run was given."""
    prompts = _prompts(getattr(manager, "data_source", None))
    if prompts is None:
        sys.stderr.write(
            "rlprobe: the data source lists no prompts, so recorded ones are not checked against "
            "it\n"
        )
        return
    known = set(debug_data.identities(prompts))
    strange = [i for i, s in enumerate(recorded.samples) if s.prompt_identity not in known]
    if strange:
        rows = ", ".join(map(str, strange[:8])) + (", …" if len(strange) > 8 else "")
        raise ReplayError(
            f"{len(strange)} of {len(recorded)} samples in {source} answer prompts that this run's "
            f"data does not have (rows {rows}); use the --prompt-data, chat template and tokenizer "
            "of the collecting run"
        )


def _prompts(source: Any) -> Iterable[Any] | None:
    dataset = getattr(source, "dataset", None)
    samples = getattr(dataset, "origin_samples", None) or getattr(dataset, "samples", None)
    return None if samples is None else [sample.prompt for sample in samples]


def around_get_rollout_data(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """In a replay, what slime made of the file must be what was recorded, token for token."""
    result = original(self, *args, **kwargs)
    session = control.session()
    if session is not None and session.replay is not None:
        rollout_id = int(kwargs.get("rollout_id", args[0] if args else 0))
        samples = result[0] if isinstance(result, tuple) else result
        _check_tokens(session.replay, control.step(rollout_id), samples)
    return result


def _check_tokens(options: ReplayOptions, step: int, samples: list[Any]) -> None:
    recorded, source = load_step(options, step)
    wanted = [sample.sample_digest for sample in recorded.samples]
    found = []
    for sample in samples:
        tokens, length = [int(t) for t in sample.tokens], int(sample.response_length)
        cut = len(tokens) - length
        found.append(sample_digest(tokens[:cut], tokens[cut:]))
    if found != wanted:
        differing = [
            i for i, pair in enumerate(zip(found, wanted, strict=False)) if len({*pair}) > 1
        ]
        raise ReplayError(
            f"slime loaded {len(found)} samples, of which {len(differing)} have other tokens than "
            f"the {len(wanted)} recorded in {source} (first: row {(differing or [len(wanted)])[0]})"
        )


def around_dispose(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The end of a run: every expected stage must have been captured.

    Raises:
        HookError: nothing was trained, or an expected stage left no record.
    """
    result = original(self, *args, **kwargs)
    session = control.session()
    if session is None or session.role == "collector":
        return result
    if _generated == 0:
        args_ = self.args
        raise HookError(
            "slime ended without a single rollout: it starts at rollout "
            f"{getattr(args_, 'start_rollout_id', None)} and --num-rollout is "
            f"{getattr(args_, 'num_rollout', None)}. A checkpoint of iteration N makes slime begin "
            "at N + 1; pass --start-rollout-id"
        )
    try:
        proof.require_captured(session)
    except HookError as error:
        raise HookError(f"{error}{_hint(session)}") from None
    return result


def _hint(session: Session) -> str:
    if (
        stages.LOG_PROB in session.expected_stages
        and versions.traits(versions.installed()).reuses_log_probs
    ):
        return f". For old_log_prob: slime runs it only with {plan.FORCES_OLD_LOG_PROB}"
    return ""
