"""The generation step on the driver: recorded in a collecting run, replaced in a replay.

A replay starts no inference engine and no agent-loop worker. It takes the recorded rollouts of the
step only when every prompt it is given is the prompt they were generated from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlprobe import roles, stages
from rlprobe.capture.session import ReplayOptions, Session
from rlprobe.dumps.rollouts import recorded as saved_rollouts
from rlprobe.errors import ReplayError
from rlprobe.frameworks import progress
from rlprobe.frameworks import recorded as recorded_rollouts
from rlprobe.frameworks.verl import control, driver
from rlprobe.frameworks.verl.engine import engines
from rlprobe.frameworks.verl.replay import (
    forced,
    prompts_only,
    queue_replay,
    rollouts,
    transfer,
)
from rlprobe.rollouts import Rollouts, hdf5, vendor


def around_init_workers(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Start no agent-loop workers where there is no engine they could ask."""
    if self.config.actor_rollout_ref.rollout.name == engines.REPLAY:
        return _no_workers(self)
    return original(self, *args, **kwargs)


async def _no_workers(manager: Any) -> None:
    manager.agent_loop_workers = []


def around_generate(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replay recorded rollouts, or generate and record them."""
    session = control.session()
    if session is None:
        return original(self, *args, **kwargs)
    prompts: Any = kwargs.get("prompts", args[0] if args else None)
    queued = transfer.is_queued(prompts)
    if queued:
        validating = transfer.is_validation(prompts)
    else:
        validating = bool(prompts.meta_info.get("validate", False))
        if not validating:
            driver.on_generation(prompts)
    if session.replay is not None and not validating:
        replay = _replay_queued if queued else _replay
        return replay(session, session.replay, self, prompts)
    if self.config.actor_rollout_ref.rollout.name == engines.REPLAY:
        raise ReplayError(
            "validation asked for generation, but a replay has no inference engine; set "
            "trainer.val_before_train=false and trainer.test_freq=-1"
        )
    if queued:
        return original(self, *args, **kwargs)  # recorded when the step is over
    step, trainer_step = control.step()
    progress.report(session, stages.GENERATE, step, trainer_step)
    output = original(self, *args, **kwargs)
    if forced.wanted(session) and prompts_only.wanted() and not validating:
        return _prompts_alone(session, self, prompts, output)
    if validating or not _records(session):
        return output
    if hasattr(output, "__await__"):
        return _record_later(session, self, prompts, output)
    _lead(session, self, _record(session, self, prompts, output), "generation")
    return output


def around_step(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A step of the newer trainer: its samples are recorded before the queue is cleared."""
    batch = original(self, *args, **kwargs)
    session = control.session()
    if session is not None and _records(session):
        step, trainer_step = control.step()
        transfer.record(
            batch,
            Path(session.side, "rollouts"),
            step=step,
            trainer_step=trainer_step,
            config=self.config,
        )
        progress.report(session, stages.GENERATE, step, trainer_step, 0.0)
    return batch


def _records(session: Session) -> bool:
    """An alignment's replay needs every step; everything else writes the captured range."""
    # a benchmark that replays what was saved elsewhere records it for those that replay it
    replays = session.replay is not None and session.role != roles.BENCHMARK
    if not session.collect_rollouts or replays:
        return False
    step, _ = control.step()
    return roles.is_role(session.role) or session.capture.wants_step(step)


async def _record_later(session: Session, manager: Any, prompts: Any, output: Any) -> Any:
    result = await output
    recorded = _record(session, manager, prompts, result)
    if forced.wanted(session):
        await forced.lead(session, manager, recorded, "generation")
    return result


def _lead(session: Session, manager: Any, recorded: Rollouts, source: str) -> None:
    """Lead the engine through a step's rollouts, where that is asked for."""
    if forced.wanted(session):
        from verl.utils.ray_utils import auto_await

        auto_await(forced.lead)(session, manager, recorded, source)


def _prompts_alone(session: Session, manager: Any, prompts: Any, output: Any) -> Any:
    """The prompts themselves as samples, with the engine's log-probs of their prefill."""
    from verl.utils.ray_utils import auto_await

    async def made(found: Any) -> Any:
        found = await found if hasattr(found, "__await__") else found
        samples = prompts_only.alone(found, *control.step())
        answers = await forced.lead(session, manager, samples, "the prompts")
        batch = prompts_only.as_batch(found, samples, answers)
        if _records(session):
            _record(session, manager, prompts, batch)
        return batch

    return auto_await(made)(output)


def _record(session: Session, manager: Any, prompts: Any, output: Any) -> Rollouts:
    step, trainer_step = control.step()
    recorded = rollouts.from_batch(
        prompts,
        output,
        step=step,
        trainer_step=trainer_step,
        config=manager.config,
        tokenizer=rollouts.tokenizer(manager.config.actor_rollout_ref.model.path),
    )
    directory = Path(session.side, "rollouts")
    directory.mkdir(parents=True, exist_ok=True)
    hdf5.write(directory / f"step{step}.h5", recorded)
    progress.report(session, stages.GENERATE, step, trainer_step, 0.0)
    return recorded


def _replay(session: Session, options: ReplayOptions, manager: Any, prompts: Any) -> Any:
    step, _ = control.step()
    recorded, source = load_step(options, step)
    output = rollouts.to_batch(recorded, prompts, source)
    # a vendor's dump has tokens and no rewards
    if session.recompute_rewards or "rm_scores" not in output.batch.keys():  # noqa: SIM118
        rollouts.recompute_rewards(manager.reward_loop_worker_handles, prompts, output)
    _say_replayed(recorded, source)
    if _records(session):
        recorded = _record(session, manager, prompts, output)
    _lead(session, manager, recorded, source)
    return output


def _replay_queued(session: Session, options: ReplayOptions, manager: Any, prompts: Any) -> None:
    step, _ = control.step()
    recorded, source = load_step(options, step)
    queue_replay.put(recorded, prompts, source, manager, session.recompute_rewards)
    _say_replayed(recorded, source)


def _say_replayed(recorded: Rollouts, source: str) -> None:
    step, trainer_step = control.step()
    sys.stderr.write(
        f"rlprobe: step {step} (trainer's {trainer_step}): {len(recorded)} samples replayed "
        f"from {source}\n"
    )


def load_step(options: ReplayOptions, step: int) -> tuple[Rollouts, str]:
    """The recorded rollouts that the replay's ``step`` takes, and where they lie.

    Raises:
        ReplayError: the directory holds no rollouts, or not the step that is wanted.
    """
    if (found := recorded_rollouts.load_step(options, step)) is not None:
        return found
    root = Path(options.path)
    if not (root / "data").is_dir():
        saved = saved_rollouts.found(root)
        if saved is None:
            raise ReplayError(
                f"no recorded rollouts in {root}: neither step{{N}}.h5 files, nor rollouts/, nor "
                "data/, nor verl's own (gen_batch.dp)"
            )
        # the trainer numbers its steps from 1
        order = recorded_rollouts.order(options, [number - 1 for number in saved.steps])
        number = order.recorded(step) + 1
        return saved_rollouts.read(saved, number, step), f"{root}, verl's step {number}"
    number = recorded_rollouts.order(options, vendor.steps(root)).recorded(step)
    return vendor.read_step(root, number), f"{root}/data, step {number}"
