"""Configuration: were both sides given the same settings of the framework?

A difference either changes numbers or does not. Which, is decided by the key: places, names,
logging, resources and the engine that a replay does not use cannot; an algorithm's numbers do; what
is in neither list is said to be unknown.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlprobe import redaction
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import backends, slime_settings, trainers
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError
from rlprobe.said import NOTHING_SAID, joined, listed, of_side, say
from rlprobe.store.read import Run

CONFIGURATION = "configuration"

_CONFIGURATIONS = "configurations.json"
_MAX_BYTES = 64 << 20

#: What stands for the value of a setting that a side does not have.
_ABSENT = "(absent)"
#: Kind of a setting that one of two back ends alone has.
_OF_BACK_END = "of one back end"
#: Keys that cannot change a training number. Matched anywhere in the dotted key.
_HARMLESS = re.compile(
    r"(^|\.)(trainer\.(logger|project_name|experiment_name|default_local_dir|save_freq|test_freq|"
    r"val_.*|device|resume.*|rollout_data_dir|validation_data_dir|max_.*_ckpt.*|log_.*|"
    r"default_hdfs_dir|balance_batch)|"
    r"ray_kwargs|ray_init|global_profiler|profiler|transfer_queue|hydra|paths?|.*_path|.*_dir|"
    r".*_file|.*_files|name|agent|load_format|gpu_memory_utilization|enforce_eager|free_cache_engine|"
    r"tensor_model_parallel_size|max_num_.*|log_.*|checkpoint|num_workers|dataloader_.*|skip|"
    r"ascend_precision_collector|mock_.*|engine_kwargs|server|reward\.reward_model\.rollout|"
    r"n_gpus_per_node|nnodes|node_ip|port|timeout|verbose|tracing|trace|wandb|"
    r"rollout\.(mode|nnodes|data_parallel_size|expert_parallel_size|calculate_log_probs|prometheus|"
    r"multi_stage.*|disable_log_stats|full_determinism|dtype|seed|ignore_eos))(\.|$)"
)
#: Code or text of the user's own, wherever it lies: what lies there is not known.
_OF_THE_USER = re.compile(r"(^|\.)custom_(cls|chat_template)(\.|$)")
#: Keys of the algorithm: another value is another experiment.
_ALGORITHM = re.compile(
    r"(^|\.)(lr|lr_.*|betas|beta\d?|eps|epsilon|weight_decay|clip_grad|max_grad_norm|grad_clip|"
    r"clip_ratio.*|cliprange.*|kl_.*|use_kl.*|entropy_coeff|temperature|top_p|top_k|loss_agg_mode|"
    r"loss_mode|loss_scale.*|adv_estimator|gamma|lam|lambda|norm_adv.*|ppo_epochs|"
    r"ppo_mini_batch_size|train_batch_size|warmup.*|min_lr.*|optimizer.*|lora_.*|use_rmpad_critic|"
    r"critic_warmup|policy_loss.*|rollout_correction.*|whiten.*|reward_.*coef.*|num_cycles)(\.|$)"
)
#: Keys that change rounding, not the experiment.
_ROUNDING = re.compile(
    r"(^|\.)(.*dtype.*|mixed_precision.*|attn_implementation|use_remove_padding|use_fused.*|"
    r"use_torch_compile|.*micro_batch_size.*|use_dynamic_bsz|.*max_token_len.*|strategy|"
    r"ulysses.*|.*parallel_size|fsdp_size|offload.*|.*_offload|enable_gradient_checkpointing|"
    r"recompute.*|use_liger|entropy_from_logits_with_chunking|.*checkpointing)(\.|$)"
)


def of_run(run: Run) -> dict[str, Any] | None:
    """A run's configuration by dotted key; None where it was not dumped.

    Raises:
        DumpError: the file is damaged.
    """
    return _configured(run.dump)


def _configured(tree: Path) -> dict[str, Any] | None:
    path = tree / _CONFIGURATIONS
    if not path.is_file():
        return None
    found = path.stat()
    return dict(_settings(path, found.st_mtime_ns, found.st_size, found.st_ino))


@functools.lru_cache(maxsize=4)
def _settings(path: Path, *_: int) -> dict[str, Any]:
    """A file's settings, read once while it is the same: several items ask for them."""
    # the vendor's tool writes secrets as they are
    return flattened(redaction.value(_json(path)))


def of_dumps(benchmark: Path, target: Path) -> tuple[GateItem, Shut | None] | None:
    """Item configuration of two dump trees; None where neither has its configuration beside it.

    Raises:
        DumpError: a file is damaged.
    """
    sides = [_configured(side) or _configured(side / "dump") for side in (benchmark, target)]
    return None if sides == [None, None] else _compared(sides[0], sides[1])


def _json(path: Path) -> Any:
    try:
        return jsonfile.load(path, most=_MAX_BYTES, nonfinite=True)
    except DocumentError as error:
        raise DumpError(f"{path} is not readable: {error}") from error


def flattened(value: Any) -> dict[str, Any]:
    """Leaves of nested mappings by dotted key; lists are leaves."""
    return dict(_leaves(value, ""))


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def kind(key: str) -> str:
    """``harmless``, ``algorithm``, ``rounding`` or ``unknown``.

    Rounding before algorithm: ``ppo_micro_batch_size`` splits the same sum differently. Algorithm
    before harmless: ``optim.lr`` stays one whatever stands around it.
    """
    if key.startswith(slime_settings.PREFIX):
        return slime_settings.kind(key.removeprefix(slime_settings.PREFIX))
    if _ROUNDING.search(key):
        return "rounding"
    if _ALGORITHM.search(key):
        return "algorithm"
    harmless = _HARMLESS.search(key) and not _OF_THE_USER.search(key)
    return "harmless" if harmless else "unknown"


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, list[str]]:
    """Keys that differ, as ``key: benchmark -> target``, by kind."""
    other_back_end = backends.unlike(left, right)
    if other_back_end:
        left, right = backends.in_one_way(left), backends.in_one_way(right)
    found: dict[str, list[str]] = {}
    for key in sorted(left.keys() | right.keys()):
        b, t = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if b == t:
            continue
        # a back end's own settings are part of what is compared
        own = other_back_end and backends.is_of_one(key, left, right)
        which = _OF_BACK_END if own else kind(key)
        if which == "algorithm" and _ABSENT in (b, t) and key.startswith(slime_settings.PREFIX):
            # a namespace has every flag of its version: what the other version does is not known
            which = "unknown"
        found.setdefault(which, []).append(f"{key}: {_short(b)} -> {_short(t)}")
    return found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


def item(evidence: Evidence) -> tuple[GateItem, Shut | None]:
    """Item configuration of two runs, and the divergence that another algorithm is."""
    benchmark, target = of_run(evidence.benchmark), of_run(evidence.target)
    if trainers.unlike(evidence.benchmark, evidence.target):
        names = [trainers.of(run)[0] for run in (evidence.benchmark, evidence.target)]
        return _of_two_frameworks(benchmark, target, names)
    return _compared(benchmark, target)


def _of_two_frameworks(
    benchmark: dict[str, Any] | None, target: dict[str, Any] | None, names: list[str]
) -> tuple[GateItem, Shut | None]:
    """Settings of verl and of slime: those that both have are held against each other."""
    if benchmark is None or target is None:
        return _compared(benchmark, target)
    sides = [
        trainers.in_common(side, name)
        for side, name in zip((benchmark, target), names, strict=True)
    ]
    known = [key for key in sides[0] if None not in (sides[0][key], sides[1][key])]
    unknown = [key for key in sides[0] if key not in known]
    found = [
        f"{key}: {_short(sides[0][key])} -> {_short(sides[1][key])}"
        for key in known
        if sides[0][key] != sides[1][key]
    ]
    if found:
        return _other_algorithms(found)
    return caveat(
        CONFIGURATION,
        say(
            "{count} settings that both frameworks have are the same; not said by one side: "
            "{unknown}; all others have no counterpart",
            count=len(known),
            unknown=listed(unknown, 6) if unknown else say("none"),
        ),
        say("check by hand what this alignment gives each framework in `overrides`"),
    ), None


def _compared(
    benchmark: dict[str, Any] | None, target: dict[str, Any] | None
) -> tuple[GateItem, Shut | None]:
    if benchmark is None or target is None:
        lacking = of_side("benchmark" if benchmark is None else "target")
        return caveat(
            CONFIGURATION,
            say(
                "the {lacking}'s configuration was not dumped, so the two cannot be compared",
                lacking=lacking,
            ),
            say("run with capture.configurations on"),
        ), None
    found = differences(benchmark, target)
    harmless = (
        say("; {count} differ that cannot matter", count=len(found["harmless"]))
        if "harmless" in found
        else NOTHING_SAID
    )
    if _OF_BACK_END in found:
        harmless += say(
            "; {count} are settings of one back end alone", count=len(found[_OF_BACK_END])
        )
    if "algorithm" in found:
        return _other_algorithms(found["algorithm"])
    said = []
    action = say("differences may stem from these settings rather than from the device")
    if "rounding" in found:
        said.append(
            say(
                "settings differ that change rounding: {rounding}",
                rounding=listed(found["rounding"], 6),
            )
        )
    if "unknown" in found:
        said.append(
            say("settings differ that may matter: {unknown}", unknown=listed(found["unknown"], 6))
        )
        action = say("check whether they change what is computed")
    if said:
        return caveat(CONFIGURATION, joined(said, "; ") + harmless, action), None
    return opened(
        CONFIGURATION,
        say("{count} settings compared{harmless}", count=len(benchmark), harmless=harmless),
    ), None


def _other_algorithms(found: list[str]) -> tuple[GateItem, Shut | None]:
    said = say("the two sides run other algorithms: {algorithm}", algorithm=listed(found, 6))
    closed = Shut("hyperparameter", CONFIGURATION, "", 0, None, None, {}, {}, [said])
    return shut(
        CONFIGURATION, said, say("use the same values on both sides (overrides of the alignment)")
    ), closed
