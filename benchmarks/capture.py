"""What capture costs: step time, memory and disk, against no capture and against msprobe L0.

Every mode runs in processes of its own, several times, in turn with the others, on one thread; a
mode's step time is the smallest of its processes' medians, so that a neighbour's load counts
against no one. Beside it stands the same in processor time, which waiting for a processor does not
touch. A mode's overhead is its step less one without capture; what holds on any machine is its
share of msprobe's overhead at L0 in the same call, by either clock.
The model is a 4-layer Qwen2 (hidden 256, 4 sequences of 128 tokens); it has no key data, whose cost
is measured on a real run instead (key_data.py).

    python benchmarks/capture.py                     # the modes with a goal
    python benchmarks/capture.py --modes all --rounds 3
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

#: Mode: engine, level, task, sketches, provenance; None captures nothing. Of names that end in
#: ``+coordinates`` or ``+tokens``, records by coordinates or sketches per token come besides.
MODES: dict[str, tuple[str, str, str, bool, bool] | None] = {
    "none": None,
    "light": ("light", "L0", "statistics", False, False),
    "light+sketch": ("light", "L0", "statistics", True, False),
    "light+sketch+tokens": ("light", "L0", "statistics", True, False),
    "light+sketch+coordinates": ("light", "L0", "statistics", True, False),
    "light+sketch+provenance": ("light", "L0", "statistics", True, True),
    "msprobe-L0": ("plain-msprobe", "L0", "statistics", False, False),
    "msprobe-L1": ("plain-msprobe", "L1", "statistics", False, False),
    "msprobe-mix": ("plain-msprobe", "mix", "statistics", False, False),
    "msprobe-tensor-L0": ("plain-msprobe", "L0", "tensor", False, False),
    "our-msprobe-L0": ("msprobe", "L0", "statistics", False, False),
    "our-msprobe-L0+sketch": ("msprobe", "L0", "statistics", True, False),
    "our-msprobe-tensor-L0": ("msprobe", "L0", "tensor", False, False),
}
#: What shares are of.
PEER = "msprobe-L0"
#: Modes that a goal is stated for, and the peer.
MAIN = ("none", "light", "light+sketch", "light+sketch+tokens", "light+sketch+coordinates", PEER)
#: Shares of the peer's overhead to stay within.
GOALS = {"light": 0.30, "light+sketch": 0.45, "light+sketch+tokens": 0.55}
#: Steps left out: allocators and caches settle.
WARM_UP = 3


def measure(modes: tuple[str, ...] = MAIN, rounds: int = 3, steps: int = 15) -> dict[str, Any]:
    """Run every mode ``rounds`` times in turn.

    Args:
        modes: keys of MODES; ``none`` is added.
        rounds: processes per mode.
        steps: training steps per process.

    Returns:
        ``step_ms``, ``step_ratio``, ``cpu_ms``, ``cpu_ratio``, ``peak_mib`` and
        ``disk_mib_per_step``, each by mode; ``share`` of the peer's overhead by mode, as ``wall``
        and ``processor`` (where the peer is among the modes), and ``goals`` with what was found.
    """
    modes = tuple(dict.fromkeys(("none", *modes)))
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else reversed(modes):
            runs[mode].append(_run(mode, steps))
    best = {mode: min(r["step_ms"] for r in found) for mode, found in runs.items()}
    cpu = {mode: min(r["cpu_ms"] for r in found) for mode, found in runs.items()}
    share = {}
    if PEER in modes:
        share = {
            mode: {"wall": _share(best, mode), "processor": _share(cpu, mode)}
            for mode in modes
            if mode not in ("none", PEER)
        }
    return {
        "step_ms": best,
        "step_ratio": {mode: value / best["none"] for mode, value in best.items()},
        "cpu_ms": cpu,
        "cpu_ratio": {mode: value / cpu["none"] for mode, value in cpu.items()},
        "peak_mib": {mode: max(r["peak_mib"] for r in found) for mode, found in runs.items()},
        "disk_mib_per_step": {mode: found[0]["disk_mib"] for mode, found in runs.items()},
        "share": share,
        "goals": {
            mode: {"at_most": goal, **share[mode]} for mode, goal in GOALS.items() if mode in share
        },
    }


def _share(step_ms: dict[str, float], mode: str) -> float:
    """The overhead of a mode as a share of the peer's."""
    return (step_ms[mode] - step_ms["none"]) / (step_ms[PEER] - step_ms["none"])


def _run(mode: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="rlprobe-bench-") as scratch:
        command = [sys.executable, __file__, "--worker", mode, scratch, "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"mode {mode} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def work(mode: str, scratch: Path, steps: int) -> dict[str, float]:
    """One process of one mode: train, and say what a step took."""
    import torch

    torch.set_num_threads(1)
    around = _capture(mode, scratch)
    model, batch = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    took: list[float] = []
    cpu: list[float] = []
    for step in range(steps):
        started, used = time.perf_counter(), time.process_time()
        with around(step, model):
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        took.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    size = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    return {
        "step_ms": statistics.median(took[WARM_UP:]) * 1e3,
        "cpu_ms": statistics.median(cpu[WARM_UP:]) * 1e3,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "disk_mib": size / steps / 2**20,
    }


def _model() -> tuple[Any, Any]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=256,
        attn_implementation="eager",
        use_cache=False,
    )
    generator = torch.Generator().manual_seed(1)
    return Qwen2ForCausalLM(config), torch.randint(0, 4096, (4, 128), generator=generator)


Around = Callable[[int, Any], AbstractContextManager[Any]]


def _capture(mode: str, scratch: Path) -> Around:
    chosen = MODES[mode]
    if chosen is None:
        return lambda step, model: nullcontext()
    engine, level, task, sketch, with_provenance = chosen
    if engine == "plain-msprobe":
        return _plain_msprobe(scratch, level, task)
    from rlprobe.capture.recorder import Recorder
    from rlprobe.capture.session import CaptureOptions, Session

    options = CaptureOptions(
        engine=engine,
        stages=("actor_update",),
        step_end=10**6,
        level=level,
        task=task,
        sketch=sketch,
        key_data=False,
        token_sketch=mode.endswith("+tokens"),
        coordinate_sketch=mode.endswith("+coordinates"),
        provenance=with_provenance,
    )
    session = Session("benchmark", "verl", str(scratch / "dump"), str(scratch / "side"), options)
    recorder = Recorder(session, role="actor", rank=0, world_size=1)
    return lambda step, model: recorder.stage("actor_update", step, step + 1, model)


def _plain_msprobe(scratch: Path, level: str, task: str) -> Around:
    """msprobe as its manual says, without anything of ours: the peer."""
    config = scratch / "config.json"
    document = {"task": task, "dump_path": str(scratch / "dump"), "rank": [], "step": []}
    config.write_text(json.dumps({**document, "level": level, task: {}}), encoding="utf-8")
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(config))

    @contextmanager
    def around(step: int, model: Any) -> Iterator[None]:
        debugger.start(model=model)
        yield
        debugger.stop()
        debugger.step()

    return around


def figure(args: argparse.Namespace) -> dict[str, Any]:
    """The light engine with sketches against msprobe at L0, as every benchmark's figure."""
    found = measure(rounds=args.runs)
    ours, peer = "light+sketch", "msprobe-L0"
    seconds = {mode: ms / 1e3 for mode, ms in found["step_ms"].items()}
    return {
        "name": "capture",
        "ours_s": seconds[ours],
        "peer_s": None if args.no_peer else seconds[peer],
        "ratio": None if args.no_peer else seconds[peer] / seconds[ours],
        "ours_mib": found["peak_mib"][ours],
        "peer_mib": None if args.no_peer else found["peak_mib"][peer],
        "command": "python benchmarks/capture.py",
        "step_ratio": found["step_ratio"],
        "share": found["share"],
    }


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"capture": figure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "DIR"), help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", default=list(MAIN), help="mode names, or all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.worker[0], Path(args.worker[1]), args.steps)))
        return
    modes = tuple(MODES) if args.modes == ["all"] else tuple(args.modes)
    print(json.dumps(measure(modes, args.rounds, args.steps), indent=1))


if __name__ == "__main__":
    main()
