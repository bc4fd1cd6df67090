"""The capture section: what is recorded of each captured step, and by which engine."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlprobe.config.section import Section
from rlprobe.errors import ConfigError
from rlprobe.stages import ALIASES, STAGES, canonical, order


def _canonical(name: str) -> str:
    try:
        return canonical(name)
    except ConfigError as error:
        close = difflib.get_close_matches(name, [*STAGES, *ALIASES], n=1)
        raise ValueError(f"{error}{f'; did you mean {close[0]}?' if close else ''}") from error


#: msprobe's levels that no capture of stages can have, and what to use instead.
_OTHER_LEVELS = {
    "L2": "the kernels of one API; mix records framework calls, and after a divergence refine "
    "records the suspects' operators with their arguments",
    "debug": "what code passes to PrecisionDebugger.save; key_data holds a stage's own quantities",
}


def _level(value: object) -> object:
    if isinstance(value, str) and value in _OTHER_LEVELS:
        raise ValueError(
            f"found {value!r}, which is {_OTHER_LEVELS[value]}; accepted: L0, L1 or mix"
        )
    return value


StageName = Annotated[str, AfterValidator(_canonical)]


class CaptureSection(Section):
    """What is captured."""

    engine: Literal["light", "msprobe"] = Field(
        default="light",
        description="light: statistics and sketches per module without any effect on the run. "
        "msprobe: every level and task of the vendor's tool, at its cost.",
    )
    stages: Literal["all"] | tuple[StageName, ...] = Field(
        default="all",
        description="Stages whose model layers are recorded; all: every stage that the algorithm "
        "runs.",
        examples=["all", ["actor_compute_log_prob", "actor_update"]],
    )
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="Ranks recorded; empty: all.", examples=[[0]]
    )
    level: Annotated[Literal["L0", "L1", "mix"], BeforeValidator(_level)] = Field(
        default="L0",
        description="msprobe's level: modules (L0), framework calls (L1), both (mix).",
    )
    task: Literal["statistics", "tensor"] = Field(
        default="statistics", description="Statistics of every tensor, or the tensors themselves."
    )
    summary_mode: Literal["statistics", "md5", "xor"] = Field(
        default="statistics", description="msprobe's summary of a tensor in the statistics task."
    )
    sketch: bool = Field(
        default=True,
        description="A 61-number linear sketch per tensor: elementwise error without tensors.",
    )
    token_sketch: bool = Field(
        default=False, description="Sketches per token, of block outputs and log-probs only."
    )
    coordinate_sketch: bool | None = Field(
        default=None,
        description="One record per module for a whole stage, by sample, position and feature, "
        "which is the same in every layout: other micro-batches, other ranks, packed or padded, "
        "FSDP against Megatron (engine light). null: where the two sides' world_size or "
        "options that divide samples and models differ; true keeps the benchmark's run if the "
        "target's layout changes later.",
    )
    key_data: bool = Field(
        default=True,
        description="responses, input_ids, masks, log-probs, entropies and values per micro-batch.",
    )
    configurations: bool = Field(
        default=True, description="The framework's resolved configuration in configurations.json."
    )
    memory: bool = Field(default=False, description="Memory snapshots of the captured stages.")
    token_range: tuple[int, int] | None = Field(
        default=(0, 0),
        description="First and last generated token whose layers are recorded during generation, "
        "inclusive, 0 being the prompt's forward; null records no inference layers.",
        examples=[[0, 1]],
    )
    forced_samples: Annotated[int, Field(gt=0)] | None = Field(
        default=8,
        description="With generation: compare, how many of a step's samples each engine is led "
        "through, the first recorded ones; null: all.",
    )
    forced_tokens: int = Field(
        default=8,
        gt=0,
        description="With generation: compare, how many tokens of each of their responses are "
        "decoded one by one.",
    )

    budget_mib: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="Disk that each training process may fill with captured data, in MiB. When it "
        "is spent the run stops before the next stage, and everything captured is complete; null: "
        "no limit.",
        examples=[4096],
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> CaptureSection:
        if self.engine == "light":
            for key, only in (
                ("level", "L0"),
                ("task", "statistics"),
                ("summary_mode", "statistics"),
            ):
                found = getattr(self, key)
                if found != only:
                    raise ValueError(
                        f"{key}: {found} needs engine: msprobe; engine light records {key}: {only}"
                    )
        if self.token_sketch and not self.sketch:
            raise ValueError("token_sketch: true needs sketch: true")
        if self.coordinate_sketch and not (self.sketch and self.engine == "light"):
            raise ValueError("coordinate_sketch: true needs engine: light and sketch: true")
        if self.stages == ():
            raise ValueError("stages: an empty list records nothing; accepted: all, or stage names")
        if self.token_range is not None:
            first, last = self.token_range
            if not 0 <= first <= last:
                raise ValueError(
                    f"token_range: found [{first}, {last}]; accepted: [first, last] with "
                    "0 <= first <= last, or null"
                )
        return self

    def chosen(self, available: tuple[str, ...]) -> tuple[str, ...]:
        """The stages to capture out of those the algorithm runs, in canonical order."""
        wanted = set(available if self.stages == "all" else self.stages)
        return tuple(sorted((s for s in available if s in wanted), key=order))
