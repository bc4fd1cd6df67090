"""What a training process is told: one JSON file, named by ``RLPROBE_CONFIG``.

``rlprobe run`` writes it from an alignment, the vendor's ``precision_collector.yaml`` is turned
into it, and every process of the framework reads it. It needs the standard library only, because
it is read at interpreter start in the vendors' images.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError

#: Environment variable that switches capture on in every process.
ENV = "RLPROBE_CONFIG"
FORMAT = 1


@dataclass(frozen=True)
class CaptureOptions:
    """What is captured, and by which engine."""

    #: ``light`` (L0 statistics, no effect on the run) or ``msprobe`` (every level and task).
    engine: str = "light"
    #: Canonical names of the stages whose model layers are dumped.
    stages: tuple[str, ...] = ()
    #: Ranks dumped; empty means all.
    ranks: tuple[int, ...] = ()
    #: First and last captured step, inclusive, counted from 0.
    step_start: int = 0
    step_end: int = 0
    level: str = "L0"
    task: str = "statistics"
    #: msprobe's summary_mode: statistics, md5 or xor.
    summary_mode: str = "statistics"
    sketch: bool = True
    #: Per-token sketches of block outputs and log-probs.
    token_sketch: bool = False
    #: Records of whole stages by what their elements are (:mod:`rlprobe.coordinates`).
    coordinate_sketch: bool = False
    #: Which experts every token was sent to, where a model has routers.
    routing: bool = True
    key_data: bool = True
    configurations: bool = True
    memory: bool = False
    #: Weight digests, parameter changes and mock proof: what the gate needs of an alignment.
    provenance: bool = True
    #: Generated tokens dumped in inference, inclusive; None dumps no inference layers.
    token_range: tuple[int, int] | None = None
    #: Tokens of a response that the engine is made to decode one by one, and samples of a step that
    #: it is led through (None: all), where the forced generation stage is captured.
    forced_tokens: int = 0
    forced_samples: int | None = None
    #: Only these modules (Hugging Face paths), by msprobe also what runs in them; empty: all.
    modules: tuple[str, ...] = ()
    #: Keep the tensors of those modules, with the light engine; used by refine.
    tensors: bool = False
    #: Only in these micro-batches, when not empty.
    micro_steps: tuple[int, ...] = ()
    #: Bytes of tensors per stage and process; None: no limit.
    tensor_budget: int | None = None
    #: The operators of one part of the stage: ``module``, ``outputs`` (what surrounds the model:
    #: log-probs and losses) or ``update`` (reduction, clipping, optimizer); used by refine.
    trace: str | None = None
    #: Path of the module, of ``module``.
    trace_module: str | None = None
    #: Keep that module's outputs of every call, for the other side.
    keep_outputs: bool = False
    #: Directory of such outputs, which it gives out in place of its own.
    substitute: str | None = None
    #: Modules that follow each other, of which the same is done in the micro-batches above.
    blocks: tuple[str, ...] = ()
    #: Disk each process may fill, in MiB; a stage that has begun is finished. None: no limit.
    budget_mib: int | None = None
    #: Part of it that per-token sketches may take.
    token_sketch_mib: int = 256

    def wants_step(self, step: int) -> bool:
        return self.step_start <= step <= self.step_end

    def wants_rank(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks


@dataclass(frozen=True)
class ReplayOptions:
    """Mock inference: where recorded rollouts lie and in which order they are used."""

    #: Directory of step{N}.h5 files, or a vendor dump_path.
    path: str
    #: None: by the real step; -1: cycle through the range; else the seed of a random sequence.
    seed: int | None = None
    step_start: int = 0
    step_end: int | None = None


@dataclass(frozen=True)
class Session:
    """Everything a process needs to know. Paths are absolute."""

    #: benchmark, target, repeat, repeat_target, high_precision, or collector (the vendor's YAML).
    role: str
    framework: str
    #: Where the contract's tree goes (``{stage}/step{N}/rank{R}/…``, ``data/``).
    dump: str
    #: Where what is not in the tree goes: parts/, rollouts/, metrics.jsonl.
    side: str
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    replay: ReplayOptions | None = None
    #: Write rollouts of the captured steps.
    collect_rollouts: bool = True
    #: Keep each trained model's state at the start of every captured step but the run's first.
    keep_states: bool = False
    #: Where such states lie that this run loads at the same steps; None: it goes its own way.
    join_states: str | None = None
    #: Directory of another run's choices of experts, which this run's tokens are sent to
    #: (``{stage}-step{N}.npz``); None: to those that its own routers choose.
    routing: str | None = None
    #: Recompute rewards in a replay instead of taking the recorded ones.
    recompute_rewards: bool = False
    deterministic: bool = False
    seed: int = 1234
    device: str = "cpu"
    #: ``FILE:NAME`` of a planted fault, or None.
    fault: str | None = None
    fault_strength: float = 1.0
    #: First step that it is planted in.
    fault_step: int = 0
    #: Number of a perturbed control, whose weights are disturbed in the last bit of ``precision``
    #: before it trains (:mod:`rlprobe.capture.perturbed`); 0: none.
    perturbed: int = 0
    #: That the models compute in; empty where nobody said.
    precision: str = ""
    #: Canonical stages that must have been captured when the run ends.
    expected_stages: tuple[str, ...] = ()
    #: The version that the run's identity is made with; None where nothing declares one.
    framework_version: str | None = None
    #: Framework settings that the hooks need (verl: none so far).
    settings: dict[str, Any] = field(default_factory=dict)

    def joins_step(self, step: int) -> bool:
        """Whether a state is kept, or loaded, at the start of a step.

        The first of a run begins from what both sides load themselves: a wrong load is to be found.
        """
        return step > 0 and self.capture.wants_step(step)

    def joined_steps(self) -> list[int]:
        """Steps at whose start a state is kept or loaded, where that is asked for."""
        steps = range(self.capture.step_start, self.capture.step_end + 1)
        return [step for step in steps if self.joins_step(step)]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, origin: str = "session") -> Session:
        """Parse :meth:`to_json`'s output.

        Raises:
            ConfigError: not JSON, another format version, or an unknown key.
        """
        try:
            raw = jsonfile.parse(text)
        except DocumentError as error:
            raise ConfigError(f"{origin}: {error}") from error
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
            raise ConfigError(f"{origin} is not a session file of format {FORMAT}")
        raw["capture"] = _build(CaptureOptions, raw.get("capture") or {}, origin)
        if raw.get("replay") is not None:
            raw["replay"] = _build(ReplayOptions, raw["replay"], origin)
        session: Session = _build(cls, raw, origin)
        return session

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Session:
        """Read a session file.

        Raises:
            ConfigError: the file is missing or not a session.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{ENV} names {path}: {error.strerror or error}") from error
        return cls.from_json(text, str(path))


def _build(cls: type[Any], raw: Any, origin: str) -> Any:
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: found {raw!r:.60} where {cls.__name__} has its keys")
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConfigError(f"{origin}: unknown key {unknown[0]!r}; accepted: {sorted(known)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{origin}: {error}") from error
