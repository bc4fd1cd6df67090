"""Framework: is the benchmark's run one of the framework and version that the target's is?

Within one framework, versions differ on purpose or by mistake; an imported benchmark may also be of
another version than the alignment says. Between verl and slime no setting has the same name: what
both have is compared under verl's name, and which stages mean the same is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import backends
from rlprobe.diagnose.gate.evidence import Evidence, caveat
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, listed, say
from rlprobe.store.read import Run

FRAMEWORK = "framework"
Settings = Mapping[str, Any]

_ACTOR = "actor_rollout_ref.actor"
_AVERAGED = "loss averaged over"
_TOKENS, _SAMPLES = "tokens", "samples"
#: What a setting is called here (verl's name of it), in verl and in slime.
_COMMON = (
    ("actor.optim.lr", f"{_ACTOR}.optim.lr", "slime.lr"),
    ("actor.optim.weight_decay", f"{_ACTOR}.optim.weight_decay", "slime.weight_decay"),
    ("actor.optim.clip_grad", f"{_ACTOR}.optim.clip_grad", "slime.clip_grad"),
    ("actor.entropy_coeff", f"{_ACTOR}.entropy_coeff", "slime.entropy_coef"),
    ("actor.clip_ratio_low", f"{_ACTOR}.clip_ratio_low", "slime.eps_clip"),
    ("actor.clip_ratio_high", f"{_ACTOR}.clip_ratio_high", "slime.eps_clip_high"),
    ("algorithm.adv_estimator", "algorithm.adv_estimator", "slime.advantage_estimator"),
    ("algorithm.gamma", "algorithm.gamma", "slime.gamma"),
    ("algorithm.lam", "algorithm.lam", "slime.lambd"),
    ("rollout.temperature", "actor_rollout_ref.rollout.temperature", "slime.rollout_temperature"),
    ("rollout.n", "actor_rollout_ref.rollout.n", "slime.n_samples_per_prompt"),
)


def of(run: Run) -> tuple[str, str]:
    """The framework and version that a run was declared with; empty where it does not say."""
    declared = run.manifest.declared
    return str(declared.get("framework") or ""), str(declared.get("framework_version") or "")


def unlike(benchmark: Run, target: Run) -> bool:
    """Whether the runs are of two frameworks."""
    names = {of(benchmark)[0], of(target)[0]}
    return len(names) == 2 and "" not in names


def in_common(settings: Settings, framework: str) -> dict[str, Any]:
    """The settings that verl and slime both have, under verl's names; None where one is not said.

    Args:
        settings: a run's configuration by dotted key.
        framework: whose.
    """
    return _READ[framework](settings)


def _of_verl(settings: Settings) -> dict[str, Any]:
    own = backends.in_one_way(settings)
    found = {name: own.get(key) for name, key, _ in _COMMON}
    betas = own.get(f"{_ACTOR}.optim.betas")
    found["actor.optim.betas"] = list(betas) if isinstance(betas, list | tuple) else None
    in_loss = own.get(f"{_ACTOR}.use_kl_loss")
    found["actor.kl_loss_coef"] = own.get(f"{_ACTOR}.kl_loss_coef") if in_loss else 0
    mode = own.get(f"{_ACTOR}.loss_agg_mode")
    found[_AVERAGED] = {"token-mean": _TOKENS, "seq-mean-token-mean": _SAMPLES}.get(str(mode), mode)
    return found


def _of_slime(settings: Settings) -> dict[str, Any]:
    found = {name: settings.get(key) for name, _, key in _COMMON}
    if found["actor.clip_ratio_high"] is None:  # slime's own default
        found["actor.clip_ratio_high"] = found["actor.clip_ratio_low"]
    estimator = found["algorithm.adv_estimator"]
    found["algorithm.adv_estimator"] = {"ppo": "gae"}.get(str(estimator), estimator)
    betas = [settings.get(f"slime.adam_beta{number}") for number in (1, 2)]
    found["actor.optim.betas"] = None if None in betas else betas
    in_loss = settings.get("slime.use_kl_loss")
    found["actor.kl_loss_coef"] = settings.get("slime.kl_loss_coef") if in_loss else 0
    by_token = settings.get("slime.calculate_per_token_loss")
    found[_AVERAGED] = None if by_token is None else _TOKENS if by_token else _SAMPLES
    return found


_READ: dict[str, Callable[[Settings], dict[str, Any]]] = {"verl": _of_verl, "slime": _of_slime}


def item(evidence: Evidence) -> GateItem | None:
    """What is to be known where the runs are not of one framework, or not of the one declared."""
    if unlike(evidence.benchmark, evidence.target):
        return _unlike(evidence)
    return _other_than_declared(evidence)


def _unlike(evidence: Evidence) -> GateItem:
    runs = (evidence.benchmark, evidence.target)
    captured = [{n for n, s in r.manifest.stages.items() if s.state == "captured"} for r in runs]
    both = sorted(captured[0] & captured[1], key=stages.order)
    alone = sorted(captured[0] ^ captured[1], key=stages.order)
    names = [" ".join(filter(None, of(run))) for run in runs]
    found = say(
        "benchmark {benchmark}, target {target}; stages that mean the same and ran on both sides: "
        "{both}; on one side alone: {alone}",
        benchmark=names[0],
        target=names[1],
        both=listed(both) if both else say("none"),
        alone=listed(alone) if alone else say("none"),
    )
    return caveat(
        FRAMEWORK,
        found,
        say(
            "models' forward passes, log-probs, values, advantages and the optimizer's changes are "
            "the same quantities in both; metrics and settings of the same meaning have other "
            "names, and what each framework does by itself is found as if the device had done it"
        ),
    )


def _other_than_declared(evidence: Evidence) -> GateItem | None:
    plan = evidence.results.plan
    other: list[Said] = []
    for role, run in ((BENCHMARK, evidence.benchmark), (TARGET, evidence.target)):
        planned = plan.runs.get(role)
        wanted = (planned.framework_version if planned else "") or plan.framework_version
        version = of(run)[1]
        if wanted and version and wanted != version:
            other.append(
                say(
                    "the {role}'s run is of {framework} {version}, the alignment says {wanted}",
                    role=role,
                    framework=of(run)[0],
                    version=version,
                    wanted=wanted,
                )
            )
    if not other:
        return None
    return caveat(
        FRAMEWORK,
        listed(other),
        say("correct framework_version of that side, which names what was run and changes nothing"),
    )
