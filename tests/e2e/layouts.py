"""Layouts of one training, and runs in them that replay the same rollouts.

One FSDP rank collects. Every layout replays its rollouts, clean and with each planted fault, and
any run is then held against any other through the pipeline's own functions::

    python tests/e2e/layouts.py --directory DIR --json FILE [--experts] [--pairs A:B ...]

prints the table of docs/layouts.md and exits non-zero where something falls short (``make
layouts``).
What is in the directory or the file already is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.config import load
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.documents import seal
from rlprobe.roles import BENCHMARK, REPEAT, TARGET
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.launch import Start, launch
from rlprobe.runs.plan import plan
from rlprobe.selftest import catalogue
from rlprobe.selftest.catalogue import Case
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.spec import RunSpec

FAULTS = Path(__file__).with_name("faults_of_layouts")
FAULTS_OF_EXPERTS = Path(__file__).with_name("faults_of_experts")
ROOT = Path(__file__).resolve().parents[2]
MODELS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
#: The target's kernels are others than the benchmark's, so that there is round-off.
OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}


@dataclass(frozen=True)
class Layout:
    """How a training is laid out."""

    world_size: int = 1
    overrides: tuple[str, ...] = ()


def _micro(size: int) -> tuple[str, ...]:
    return (
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={size}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={size}",
    )


def _megatron(*options: str) -> tuple[str, ...]:
    chosen = tuple(f"{model}.megatron.{option}" for model in MODELS for option in options)
    return ("model_engine=megatron", *chosen)


_PACKED = ("actor_rollout_ref.model.use_remove_padding=true",)
_FSDP1 = ("actor_rollout_ref.actor.strategy=fsdp",)
#: The layout that the rollouts are collected in.
COLLECTED = "fsdp2"
LAYOUTS: dict[str, Layout] = {
    "fsdp2": Layout(),
    "fsdp2-2ranks": Layout(2),
    "fsdp1": Layout(1, _FSDP1),
    "fsdp1-2ranks": Layout(2, _FSDP1),
    "micro-1": Layout(1, _micro(1)),
    "micro-4": Layout(1, _micro(4)),
    "packed": Layout(1, _PACKED),
    "megatron": Layout(1, _megatron()),
    "megatron-tp2": Layout(2, _megatron("tensor_model_parallel_size=2")),
    "megatron-pp2": Layout(
        2,
        _megatron("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"),
    ),
    # fewer groups of heads than ranks
    "megatron-tp4": Layout(4, _megatron("tensor_model_parallel_size=4")),
    "megatron-tp2-dp2": Layout(4, _megatron("tensor_model_parallel_size=2")),
    "megatron-dp2": Layout(2, _megatron("use_distributed_optimizer=false")),
    "megatron-dp2-sharded": Layout(2, _megatron("use_distributed_optimizer=true")),
}
#: Those of a model with experts.
LAYOUTS_OF_EXPERTS: dict[str, Layout] = {
    "fsdp2": Layout(),
    "fsdp2-2ranks": Layout(2),
    "megatron": Layout(1, _megatron()),
    "megatron-ep2": Layout(2, _megatron("expert_model_parallel_size=2")),
}


class Layouts:
    """Runs of one training in every layout.

    Args:
        directory: of store and results.
        start: starts runs.
        experts: of a model with experts.
        precision: of both sides.
    """

    def __init__(
        self, directory: Path, start: Start, experts: bool = False, precision: str = "fp32"
    ) -> None:
        self.directory = directory
        self.layouts = LAYOUTS_OF_EXPERTS if experts else LAYOUTS
        self._start = start
        self._faults = {case.name: case.reference for case in cases(experts)}
        raw = yaml.safe_load((ROOT / "config/examples/verl_megatron_cpu.yaml").read_text())
        raw |= {
            "name": "layouts",
            "store": str(directory / "store"),
            "results": str(directory / "results"),
        }
        # a critic has a bias in FSDP and none in Megatron, which decays no norm: without either the
        # back ends compute the same
        changed = ("model_engine=", "algorithm.adv_estimator=", "critic.")
        raw["overrides"] = [o for o in raw["overrides"] if not o.startswith(changed)]
        raw["overrides"] += [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.optim.weight_decay=0",
        ]
        raw["model"].pop("critic_path")
        if experts:
            raw["model"]["path"] = "builtin:tiny-qwen3-moe-splits"
        for side in ("benchmark", "target"):
            raw[side]["precision"] = precision
        raw["capture"] = {"engine": "light", "token_sketch": True, "token_range": None,
                          "coordinate_sketch": True}  # fmt: skip
        path = directory / "layouts.yaml"
        path.write_text(yaml.safe_dump(raw))
        self.alignment = load(path)
        self._planned = plan(self.alignment, {})

    def spec(self, layout: str, *, target: bool, fault: str | None = None) -> RunSpec:
        """The replay of a layout; as a target it has other kernels, and the fault."""
        if layout == COLLECTED and not target:
            return self._planned[BENCHMARK]
        where = self.layouts[layout]
        spec = self._planned[TARGET if target else REPEAT]
        return dataclasses.replace(
            spec,
            world_size=where.world_size,
            overrides=(*spec.overrides, *where.overrides),
            environment=OTHER_KERNELS if target else {},
            fault=None if fault is None else self._faults[fault],
            identities=dataclasses.replace(spec.identities, fault=fault),
        )

    def run(self, spec: RunSpec) -> Path:
        """Start a run, or take it from the store."""
        launch(self._planned[BENCHMARK], self.directory / "store", start=self._start)
        return launch(spec, self.directory / "store", start=self._start).parent

    def judge(self, benchmark: str, target: str, fault: str | None = None) -> Diagnosis:
        """Hold one layout's run against another's."""
        runs: Mapping[str, RunSpec] = {
            BENCHMARK: self.spec(benchmark, target=False),
            TARGET: self.spec(target, target=True, fault=fault),
        }
        found = [self.run(spec) for spec in runs.values()]
        out = self.directory / "results" / f"{benchmark}.{target}.{fault or 'clean'}"
        shutil.rmtree(out, ignore_errors=True)
        jobs = Jobs(self.alignment, dict(runs), {TARGET: (BENCHMARK, TARGET)})
        options = Options(pair=TARGET, stages=jobs.stages(TARGET), coverage=0.9)
        left, right = (sides.resolve(str(path), None) for path in found)
        compare(left, right, out / "compare" / TARGET, options)
        plan_of: dict[str, Any] = jobs.described()
        (out / "alignment.json").write_text(json.dumps(seal.sealed(plan_of), indent=1))
        return diagnose(out)


#: Of planted faults, those of what a model with experts has not.
_DENSE = ("up", "down", "sent_back", "one_shard")


def cases(experts: bool = False) -> list[Case]:
    """The planted faults, or those of a model with experts."""
    if not experts:
        return catalogue.cases([FAULTS])
    every = catalogue.cases([FAULTS, FAULTS_OF_EXPERTS])
    return [case for case in every if case.name not in _DENSE]


#: A module of one expert of several.
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


def is_found(case: Case, found: Diagnosis, pair: str) -> bool:
    """Whether a fault was found with its stage and module.

    A layer's experts are one module in transformers: against it, one expert's is found there.
    """
    first, module = found.first, case.declared.module
    expert = _EXPERT.match(module or "")
    if expert is not None and "fsdp2" in pair:
        module = expert[1]
    return (
        found.verdict == "diverged"
        and first is not None
        and (first.stage, first.module) == (case.declared.stage, module)
    )


def planted(case: Case, layout: Layout) -> bool:
    """Whether a fault means something in a layout: one of a single rank needs several."""
    return case.name != "one_shard" or layout.world_size > 1


def looked_at(layouts: Layouts, pair: str, faults: Iterable[Case]) -> dict[str, str]:
    """What is said of a pair of layouts, clean and with each fault in the target."""
    benchmark, _, target = pair.partition(":")
    clean = layouts.judge(benchmark, target)
    found = {"clean": clean.verdict if clean.verdict == "aligned" else clean.sentence}
    for case in faults:
        if not planted(case, layouts.layouts[target]):
            continue
        judged = layouts.judge(benchmark, target, case.name)
        good = is_found(case, judged, pair)
        found[case.name] = "found" if good else judged.sentence
    return found


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """The table of docs/layouts.md: a row a pair."""
    lines = ["| benchmark | target | clean | faults found with stage and module |",
             "|---|---|---|---|"]  # fmt: skip
    for pair, said in results.items():
        benchmark, _, target = pair.partition(":")
        faults = [text for name, text in said.items() if name != "clean"]
        right = sum(text == "found" for text in faults)
        clean = "aligned" if said["clean"] == "aligned" else "not aligned"
        counted = f"{right} of {len(faults)}" if faults else "none planted"
        lines.append(f"| {benchmark} | {target} | {clean} | {counted} |")
    return "\n".join(lines)


def shortfalls(results: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What is not as it should be, in words."""
    return [
        f"{pair}, {name}: {text}"
        for pair, said in results.items()
        for name, text in said.items()
        if text != ("aligned" if name == "clean" else "found")
    ]


def _both_ways(layouts: Iterable[str]) -> list[str]:
    """Every layout against the one that the rollouts are collected in, and back."""
    others = [layout for layout in layouts if layout != COLLECTED]
    return [pair for own in others for pair in (f"{COLLECTED}:{own}", f"{own}:{COLLECTED}")]


PAIRS = [*_both_ways(LAYOUTS), "fsdp1:megatron-tp2", "megatron-pp2:fsdp1-2ranks"]
PAIRS_OF_EXPERTS = [*_both_ways(LAYOUTS_OF_EXPERTS), "megatron:megatron-ep2"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pairs", nargs="*")
    parser.add_argument("--experts", action="store_true", help="of a model with experts")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--clean", action="store_true", help="without faults")
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="these alone")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.json.read_text()) if options.json.is_file() else {}
    faults = [] if options.clean else cases(options.experts)
    if options.faults:
        faults = [case for case in faults if case.name in options.faults]
    pairs = options.pairs or (PAIRS_OF_EXPERTS if options.experts else PAIRS)
    with ForkServers(options.directory / "logs") as servers:
        layouts = Layouts(options.directory, servers, options.experts, options.precision)
        for pair in pairs:
            if len(results.get(pair, {})) <= (1 if faults else 0):
                results[pair] = looked_at(layouts, pair, faults)
                options.json.write_text(json.dumps(results, indent=1))
                print(pair, results[pair], flush=True)
    print(table(results))
    found = shortfalls(results)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
