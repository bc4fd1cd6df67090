"""Do the hooks fit every slime they are said to fit, and refuse the others before training?

``tests/slime/signatures.json`` holds the signatures of the hook points, read from slime's tags. A
module with those signatures stands in for each tag; no slime is needed.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.errors import HookError
from rlprobe.frameworks.slime import control, hooks, running, workers

HISTORY = json.loads((Path(__file__).parents[1] / "slime" / "signatures.json").read_text())
SUPPORTED = ("v0.2.2", "v0.2.3", "v0.2.4", "v0.3.0", "v0.3.1", "HEAD")
_FILES = {
    hooks.ACTOR: "slime/backends/megatron_utils/actor.py",
    hooks.MODEL: "slime/backends/megatron_utils/loss.py",
    hooks.ROLLOUT: "slime/ray/rollout.py",
}


def function(name: str, signature: str | None, method: bool) -> Callable[..., Any] | None:
    """A function of this signature that returns its arguments by name."""
    if signature is None:
        return None
    names = [part for part in signature.strip("()").split(",") if part and part != "*"]
    given = ", ".join(f"{part!r}: {part}" for part in names)
    parameters = ", ".join((["self"] if method else []) + [f"{part}=None" for part in names])
    space: dict[str, Any] = {}
    exec(f"def {name}({parameters}):\n    return {{{given}}}", space)
    return space[name]


def module(name: str, tag: str) -> types.ModuleType:
    """A module with a tag's functions of it, as far as they are hooked."""
    signatures = HISTORY[tag]["signatures"]
    made = types.ModuleType(name)
    for wanted in hooks.REQUIRED[name]:
        owner, _, method = wanted.rpartition(".")
        # train and forward_only are defined in model.py and imported into actor.py
        file = (
            "slime/backends/megatron_utils/model.py"
            if wanted in ("train", "forward_only")
            else _FILES[name]
        )
        if wanted.endswith(".dispose"):
            signature: str | None = "()"
        else:
            signature = signatures[f"{file}:{wanted}"]
        built = function(method, signature, method=bool(owner))
        if not owner:
            setattr(made, method, built)
            continue
        if not hasattr(made, owner):
            setattr(made, owner, type(owner, (), {}))
        if built is not None:
            setattr(getattr(made, owner), method, built)
    return made


@pytest.fixture
def session(tmp_path: Path):
    """A run that captures everything of its first step."""
    made = Session(
        role="benchmark",
        framework="slime",
        dump=str(tmp_path / "dump"),
        side=str(tmp_path / "side"),
        capture=CaptureOptions(stages=stages.TRAINING_STAGES, key_data=False, configurations=False),
    )
    control.reset(made, resolved=True)
    yield made
    control.reset()
    running.end()
    workers._recorders.clear()


@pytest.mark.parametrize("tag", SUPPORTED)
@pytest.mark.parametrize("name", list(_FILES))
def test_every_supported_tag_has_the_hook_points(name: str, tag: str) -> None:
    made = module(name, tag)
    hooks.check(name, {wanted: hooks._find(made, wanted) for wanted in hooks.REQUIRED[name]}, tag)


def test_an_older_slime_is_refused_by_name() -> None:
    made = module(hooks.ACTOR, "v0.1.0")
    found = {wanted: hooks._find(made, wanted) for wanted in hooks.REQUIRED[hooks.ACTOR]}
    with pytest.raises(HookError) as caught:
        hooks.check(hooks.ACTOR, found, "0.1.0")
    message = str(caught.value)
    assert "slime 0.1.0" in message
    assert "MegatronTrainRayActor.train_actor does not exist" in message
    assert "MegatronTrainRayActor.train_critic does not exist" in message


def test_a_renamed_argument_is_refused_with_the_signature_found() -> None:
    made = module(hooks.ACTOR, "HEAD")
    made.MegatronTrainRayActor.train_actor = function("train_actor", "(iteration,data)", True)
    found = {wanted: hooks._find(made, wanted) for wanted in hooks.REQUIRED[hooks.ACTOR]}
    with pytest.raises(HookError, match=r"train_actor\(.*iteration.*no argument rollout_id"):
        hooks.check(hooks.ACTOR, found, "0.9.0")


@pytest.mark.parametrize("tag", SUPPORTED)
def test_wrapped_functions_keep_their_signature_and_pass_everything_on(
    tag: str, session: Session
) -> None:
    made = module(hooks.ACTOR, tag)
    before = {
        wanted: inspect.signature(hooks._find(made, wanted))  # type: ignore[arg-type]
        for wanted in hooks.REQUIRED[hooks.ACTOR]
    }
    hooks._checked(hooks._actor, made)
    for wanted, signature in before.items():
        assert inspect.signature(hooks._find(made, wanted)) == signature  # type: ignore[arg-type]
    actor = made.MegatronTrainRayActor()
    actor.args, actor.model = types.SimpleNamespace(), [nn.Linear(2, 2)]
    data = {"tokens": [[5, 6, 7]], "response_lengths": [1]}

    names = list(before["MegatronTrainRayActor.train_actor"].parameters)[1:]
    values = {name: object() for name in names} | {"rollout_id": 4, "rollout_data": data}
    assert actor.train_actor(*values.values()) == values
    assert actor.train_actor(**values) == values

    running.begin(running.Running(actor, "actor", 4, data))
    names = list(before["MegatronTrainRayActor.compute_log_prob"].parameters)[1:]
    values = {name: object() for name in names} | {"store_prefix": "ref_"}
    assert actor.compute_log_prob(**values) == values

    names = list(before["train"].parameters)
    optimizer = types.SimpleNamespace(step=lambda: None)
    iterator = types.SimpleNamespace(micro_batch_indices=[[0]], rollout_data=data)
    values = {name: object() for name in names}
    values |= {"model": actor.model, "optimizer": optimizer, "data_iterator": [iterator]}
    assert made.train(*values.values()) == values
    assert vars(optimizer).keys() == {"step"}, "the optimizer is left as it was"


def test_an_unknown_version_warns_and_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], session: Session
) -> None:
    monkeypatch.setattr("rlprobe.frameworks.slime.hooks.versions.installed", lambda: "0.9.0")
    monkeypatch.setattr(hooks, "_warned", False)
    hooks._checked(hooks._model, module(hooks.MODEL, "HEAD"))
    assert "slime 0.9.0 is not among the versions" in capsys.readouterr().err


def test_a_ray_actor_class_is_wrapped_inside(session: Session) -> None:
    """RolloutManager is an actor class as soon as its module is imported."""
    made = module(hooks.ROLLOUT, "HEAD")
    plain = made.RolloutManager
    ray_class = types.SimpleNamespace(__ray_metadata__=types.SimpleNamespace(modified_class=plain))
    made.RolloutManager = ray_class  # type: ignore[attr-defined]
    hooks._checked(hooks._rollout, made)
    for name in ("generate", "_get_rollout_data", "dispose"):
        assert getattr(plain, name).__wrapped__ is not None


@pytest.mark.parametrize("tag", SUPPORTED)
def test_the_debug_flags_that_runs_use_exist(tag: str) -> None:
    flags = HISTORY[tag]["flags"]
    for flag in ("save-debug-rollout-data", "load-debug-rollout-data", "save-debug-train-data"):
        assert flags[f"--{flag}"]


def test_nothing_of_slime_is_imported_by_registering() -> None:
    assert not any(name.split(".")[0] == "slime" for name in sys.modules)
