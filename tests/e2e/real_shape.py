"""An alignment of a model of a real shape: 24 layers, hidden 896, a vocabulary of 151,936, bf16.

    python tests/e2e/real_shape.py --directory DIR --json FILE [--only NAME …]

Random weights, GRPO without a reference (a model less in memory), 8 responses of 16 tokens, on
this CPU. The target computes its products in halves (round-off of another device) and must be
aligned; with a fault in layer 17's norm and one in layer 11's backward pass it must be located.
Prints time, peak memory and disk of each run, and of judging (``make real-shape``; 19 GiB of memory
or more). What is in the directory already is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.config.loading import parse
from rlprobe.diagnose.diagnosis import ALIGNED, Diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.documents import seal
from rlprobe.frameworks.verl.host import assets
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import plan
from rlprobe.selftest import catalogue
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.spec import RunSpec

FAULTS = Path(__file__).with_name("faults_of_real_shape")
LAYERS, HIDDEN, VOCABULARY = 24, 896, 151_936
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 4864,
    "num_hidden_layers": LAYERS, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
#: Standard deviation of weights: what makes a residual stream of order one.
_SPREAD = 0.05
_OVERRIDES = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.shuffle=false",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.ignore_eos=true",
]


@dataclass(frozen=True)
class Cost:
    """Seconds by the clock, largest resident memory of all processes together, bytes on disk."""

    seconds: float
    memory: int = 0
    disk: int = 0

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, {self.memory / 2**30:.1f} GiB, {self.disk / 2**20:.0f} MiB"


def model(directory: Path) -> Path:
    """Random weights of the shape, saved in bf16; made once."""
    import torch
    import transformers

    if (directory / "config.json").is_file():
        return directory
    vocabulary = assets.byte_vocabulary(VOCABULARY)
    special = {f"{name}_token_id": vocabulary[f"<{name}>"] for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**_SHAPE, **special, initializer_range=_SPREAD)
    made = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    unfinished = directory.with_suffix(".unfinished")
    made.save_pretrained(unfinished)
    assets.byte_tokenizer(vocabulary).save_pretrained(unfinished)
    unfinished.rename(directory)
    return directory


class Shape:
    """The alignment, its runs and what they cost."""

    def __init__(self, directory: Path, servers: ForkServers) -> None:
        self.directory = directory
        self._store = directory / "store"
        self._servers = servers
        side = {"device": "cpu", "precision": "bf16"}
        self._alignment = parse(
            {
                "name": "real-shape", "framework": "verl", "framework_version": "0.9.1",
                "model": {"path": str(model(directory / "model").resolve())},
                "data": {"train_files": "builtin:arithmetic"},
                "seed": 1, "steps": {"total": 1}, "overrides": _OVERRIDES,
                "capture": {"engine": "light", "token_sketch": True, "token_range": None},
                "benchmark": side, "target": side, "controls": {"repeat": False},
                "store": str(self._store), "results": str(directory / "results"),
            },
            "the real shape",
        )  # fmt: skip
        self._planned = plan(self._alignment, {})

    def run(self, spec: RunSpec) -> tuple[Path, Cost]:
        """Start a run, or take it from the store."""
        began = time.monotonic()
        with measured() as peak:
            path = launch(spec, self._store, start=self._servers).parent
        return path, Cost(time.monotonic() - began, peak[0], _size(path))

    def benchmark(self) -> tuple[Path, Cost]:
        return self.run(self._planned[BENCHMARK])

    def target(self, name: str) -> tuple[Diagnosis, Cost, Cost]:
        """What is said of the target with a change; what its run cost, and judging it."""
        planned = f"{FAULTS}/planted.py:{name}"
        spec = self._planned[TARGET]
        identities = dataclasses.replace(spec.identities, fault=name)
        spec = dataclasses.replace(spec, fault=planned, identities=identities)
        path, cost = self.run(spec)
        began = time.monotonic()
        with measured() as peak:
            found = self._judged({BENCHMARK: self._planned[BENCHMARK], TARGET: spec}, path, name)
        out = self.directory / "results" / name
        return found, cost, Cost(time.monotonic() - began, peak[0], _size(out))

    def _judged(self, runs: dict[str, RunSpec], target: Path, name: str) -> Diagnosis:
        out = self.directory / "results" / name
        shutil.rmtree(out, ignore_errors=True)
        jobs = Jobs(self._alignment, runs, {TARGET: (BENCHMARK, TARGET)})
        options = Options(pair=TARGET, stages=jobs.stages(TARGET), coverage=0.9)
        paths = (self._store / "runs" / runs[BENCHMARK].key, target)
        left, right = (sides.resolve(str(path), None) for path in paths)
        compare(left, right, out / "compare" / TARGET, options)
        plan_of: dict[str, Any] = jobs.described()
        (out / "alignment.json").write_text(json.dumps(seal.sealed(plan_of), indent=1))
        return diagnose(out)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextlib.contextmanager
def measured() -> Iterator[list[int]]:
    """The largest memory that this process and those below it had together meanwhile."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            peak[0] = max(peak[0], sum(map(_resident, _below(os.getpid()))))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _below(process: int) -> list[int]:
    """A process and all that it and they have started."""
    found = [process]
    for one in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _resident(process: int) -> int:
    """Bytes of a process, of what is shared its part."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        return 1024 * int(text.partition("Pss:")[2].split()[0])
    return 0  # it has ended


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these changes")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    short: list[str] = []
    # what was made before is told again; its costs are those of then
    rows: dict[str, Any] = {}
    if options.json.is_file():
        rows = json.loads(options.json.read_text())
    with ForkServers(options.directory / "logs") as servers:
        shape = Shape(options.directory, servers)
        _, cost = shape.benchmark()
        rows.setdefault("benchmark", {"run": vars(cost)})
        print(f"benchmark: {cost}", flush=True)
        for case in catalogue.cases([FAULTS], options.only):
            found, cost, judging = shape.target(case.name)
            print(f"{case.name}: {cost}; judged: {judging}\n  {found.sentence}", flush=True)
            run = rows.get(case.name, {}).get("run", vars(cost))
            rows[case.name] = {"run": run, "judging": vars(judging),
                               "sentence": found.sentence}  # fmt: skip
            options.json.write_text(json.dumps(rows, indent=1))
            if not _is_right(case, found):
                short.append(f"{case.name}: {found.sentence}")
    print("\n".join(short))
    return 1 if short else 0


def _is_right(case: catalogue.Case, found: Diagnosis) -> bool:
    declared, first = case.declared, found.first
    if declared.is_benign:
        return found.verdict == ALIGNED
    return first is not None and (first.stage, first.module) == (declared.stage, declared.module)


if __name__ == "__main__":
    sys.exit(main())
