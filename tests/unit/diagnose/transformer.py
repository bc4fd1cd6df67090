"""One reinforcement-learning step of a small transformer, recorded as the light engine does.

``Device`` says which kernels it has and what is wrong with it; :func:`run` makes the dump tree and
the side files of a whole run: reference log-probs, log-probs, and an update of the actor with two
micro-batches and Adam. A fault is a number or function in ``Device.faults``, by name.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlprobe import sketch, stages
from rlprobe.rollouts import Rollouts, hdf5
from rlprobe.rollouts.model import Sample
from tests.unit.diagnose import tape
from tests.unit.diagnose.tape import F32, Array, Node

WIDTH, HEADS, LAYERS, VOCABULARY, PROMPT, RESPONSE, ROWS, MICRO = 32, 2, 2, 40, 6, 8, 4, 2
TOKENS = PROMPT + RESPONSE
STAGES = (stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE)


@dataclass
class Device:
    """A device: its kernels, and what it does wrong, by name."""

    split: bool = False
    seed: int = 0
    faults: dict[str, Any] = field(default_factory=dict)
    #: Stage that the faults are confined to; None: all.
    stage: str | None = None

    def fault(self, name: str, stage: str, default: Any = None) -> Any:
        return self.faults.get(name, default) if self.stage in (None, stage) else default


def weights(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)

    def matrix(out: int, into: int) -> Array:
        return (generator.standard_normal((out, into)) * 0.2).astype(F32)

    found = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        found[f"{base}.input_layernorm.weight"] = np.ones(WIDTH, F32)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{base}.self_attn.{name}.weight"] = matrix(WIDTH, WIDTH)
        found[f"{base}.post_attention_layernorm.weight"] = np.ones(WIDTH, F32)
        found[f"{base}.mlp.gate_proj.weight"] = matrix(2 * WIDTH, WIDTH)
        found[f"{base}.mlp.up_proj.weight"] = matrix(2 * WIDTH, WIDTH)
        found[f"{base}.mlp.down_proj.weight"] = matrix(WIDTH, 2 * WIDTH)
    found["model.norm.weight"] = np.ones(WIDTH, F32)
    found["lm_head.weight"] = matrix(VOCABULARY, WIDTH)
    return found


class Dump:
    """What one stage leaves: dump.json and debug.json."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.debug: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def write(self, directory: Path) -> None:
        header = {
            "task": "statistics",
            "level": "L0",
            "framework": "pytorch",
            "dump_data_dir": None,
        }
        for name, data in (("dump.json", self.data), ("debug.json", self.debug)):
            if data:
                write_json(directory / name, {**header, "data": data})
        write_json(directory / "stack.json", {})
        write_json(directory / "construct.json", {})


def leaf(value: Array) -> dict[str, Any]:
    if value.dtype.kind in "iu":
        return {"type": "torch.Tensor", "dtype": "torch.int64", "shape": list(value.shape),
                "Max": int(value.max()), "Min": int(value.min()), "Mean": None, "Norm": None,
                "requires_grad": False, "Sketch": sketch.encode(sketch.sketch(value))}  # fmt: skip
    wide = value.astype(np.float64)
    with np.errstate(all="ignore"):
        found = {
            "type": "torch.Tensor", "dtype": "torch.float32", "shape": list(value.shape),
            "Max": float(value.max()), "Min": float(value.min()), "Mean": float(F32(wide.mean())),
            "Norm": float(F32(np.linalg.norm(wide))), "requires_grad": True,
        }  # fmt: skip
    if np.abs(value).max() < 1e30:  # the engine marks what overflows a sketch: masks, infinities
        found["Sketch"] = sketch.encode(sketch.sketch(value))
    return found


class Model:
    """The network, recording what goes through its modules."""

    def __init__(
        self, device: Device, parameters: dict[str, Array], stage: str, dump: Dump
    ) -> None:
        self.device, self.stage, self.dump = device, stage, dump
        self.kernels = tape.Kernels(device.split)
        self.nodes = {name: Node(value) for name, value in parameters.items()}

    def fault(self, name: str, default: Any = None) -> Any:
        return self.device.fault(name, self.stage, default)

    def call(
        self, path: str, kind: str, inputs: dict[str, Any], make: Any, leafy: bool = True
    ) -> Node:
        """Run a module: its record stands where it completes, as a dump has it."""
        prefix = f"Module.{path}.{kind}"
        number = self.dump.counts[prefix] = self.dump.counts.get(prefix, -1) + 1
        entry: dict[str, Any] = {"input_args": [], "input_kwargs": {}}
        for key, value in inputs.items():
            shown = leaf(value.value if isinstance(value, Node) else value)
            if key.isdigit():
                entry["input_args"].append(shown)
            else:
                entry["input_kwargs"][key] = shown
        node: Node = make()
        harm = self.fault(f"output {path}")
        if harm is not None:
            node.value = harm(node.value).astype(F32)
        entry["output"] = [leaf(node.value)]
        for shown in entry["output"]:
            shown["dtype"] = self.fault(f"format {path}", shown["dtype"])
        if hasattr(node, "chances"):
            entry["output"].append(leaf(node.chances))
        own = {
            n.rpartition(".")[2]: p for n, p in self.nodes.items() if n.rpartition(".")[0] == path
        }
        if own:
            entry["parameters"] = {name: leaf(p.value) for name, p in own.items()}
        self.dump.data[f"{prefix}.forward.{number}"] = entry
        self._watch(node, path, f"{prefix}.backward.{number}", leafy)
        return node

    def _watch(self, node: Node, path: str, name: str, leafy: bool) -> None:
        def arrived(gradient: Array) -> None:
            self.dump.data.pop(name, None)
            self.dump.data[name] = {"input": [leaf(gradient)], "output": []}

        def passed(gradients: tuple[Array | None, ...]) -> None:
            if leafy and gradients[0] is not None and len(gradients) < 3:
                self.dump.data[name]["output"] = [leaf(gradients[0].astype(F32))]

        harm = self.fault(f"backward {path}")
        if harm is not None and node.back is not None:
            plain = node.back
            node.back = lambda g: (harm(plain(g)[0]), *plain(g)[1:])
        node.on_grad.append(arrived)
        node.on_back.append(passed)

    def linear(self, path: str, x: Node) -> Node:
        weight = self.nodes[f"{path}.weight"]
        return self.call(path, "Linear", {"0": x}, lambda: tape.linear(x, weight, self.kernels))

    def norm(self, path: str, x: Node) -> Node:
        eps = self.fault(f"eps {path}", 1e-6)
        weight = self.nodes[f"{path}.weight"]
        return self.call(path, "RMSNorm", {"0": x}, lambda: tape.rms_norm(x, weight, eps))

    def attention(self, path: str, x: Node, mask: Array, angles: tuple[Array, Array]) -> Node:
        def make() -> Node:
            q, k, v = (self.linear(f"{path}.{name}", x) for name in ("q_proj", "k_proj", "v_proj"))
            q = tape.rotate(q, *angles, HEADS)
            turn = self.fault(f"key angles {path}", lambda a: a)
            cosine, sine = (turn(a) for a in angles)
            k = tape.rotate(k, cosine, sine, HEADS)
            v = Node(self.fault(f"values {path}", lambda y: y)(v.value), (v,), lambda g: (g,))
            used = self.fault(f"mask {path}", lambda m: m)(mask)
            scale = self.fault(f"scale {path}", 1.0) * (WIDTH / HEADS) ** -0.5
            mixed = tape.attention(q, k, v, HEADS, used, self.kernels, scale)
            harm = self.fault(f"backward {path}")
            if harm is not None and mixed.back is not None:
                plain = mixed.back
                mixed.back = lambda g: tuple(harm(part) for part in plain(g))
            out = identity(self.linear(f"{path}.o_proj", mixed))
            # of the record alone: nothing computes with it
            shown = self.fault(f"probabilities {path}", lambda c: c)
            out.chances = shown(mixed.chances)  # type: ignore[attr-defined]
            return out

        inputs = {"hidden_states": x, "attention_mask": mask,
                  "position_embeddings.0": angles[0],
                  "position_embeddings.1": angles[1]}  # fmt: skip
        return self.call(path, "Attention", inputs, make, leafy=False)

    def mlp(self, path: str, x: Node) -> Node:
        def make() -> Node:
            gate = self.linear(f"{path}.gate_proj", x)
            active = self.call(f"{path}.act_fn", "SiLU", {"0": gate}, lambda: tape.silu(gate))
            up = self.linear(f"{path}.up_proj", x)
            return identity(self.linear(f"{path}.down_proj", tape.multiply(active, up)))

        return self.call(path, "MLP", {"0": x}, make, leafy=False)

    def layer(self, path: str, x: Node, mask: Array, angles: tuple[Array, Array]) -> Node:
        def make() -> Node:
            normed = self.norm(f"{path}.input_layernorm", x)
            y = tape.add(x, self.attention(f"{path}.self_attn", normed, mask, angles))
            return tape.add(
                y, self.mlp(f"{path}.mlp", self.norm(f"{path}.post_attention_layernorm", y))
            )

        inputs = {"0": x, "attention_mask": mask}
        return self.call(path, "DecoderLayer", inputs, make, leafy=False)

    def logits(self, tokens: Array) -> Node:
        positions = self.fault("positions", lambda p: p)(
            np.tile(np.arange(TOKENS), (len(tokens), 1))
        )
        frequencies = 10000.0 ** (-np.arange(0, WIDTH // HEADS, 2) / (WIDTH / HEADS))
        angle = np.concatenate([positions[..., None] * frequencies] * 2, -1)
        masked = self.fault("masked value", -3.4e38)
        mask = np.where(np.tril(np.ones((TOKENS, TOKENS))) > 0, 0.0, masked).astype(F32)[None, None]

        def make() -> Node:
            weight = self.nodes["model.embed_tokens.weight"]
            x = self.call("model.embed_tokens", "Embedding", {"0": tokens},
                          lambda: tape.embedding(tokens, weight))  # fmt: skip
            turned = self.call("model.rotary_emb", "RotaryEmbedding", {"0": positions},
                               lambda: Node(np.stack([np.cos(angle), np.sin(angle)])))  # fmt: skip
            for number in range(LAYERS):
                x = self.layer(
                    f"model.layers.{number}", x, mask, (turned.value[0], turned.value[1])
                )
            return identity(self.norm("model.norm", x))

        hidden = self.call("model", "Model", {"input_ids": tokens}, make, leafy=False)
        return self.linear("lm_head", hidden)


def _times(by: Array, gradient: Array) -> tuple[Array]:
    """Back through a loss whose derivative is known."""
    return (gradient * by,)


def identity(x: Node) -> Node:
    """A node of a parent's own, so that its gradient is seen apart from its last child's."""
    return Node(x.value, (x,), lambda g: (g,))


def rollouts(seed: int) -> tuple[Rollouts, Array]:
    generator = np.random.default_rng(1000 + seed)
    tokens = generator.integers(0, VOCABULARY, (ROWS, TOKENS))
    samples = [
        Sample.build(f"s0-{row}", f"prompt {row}", tokens[row, :PROMPT], tokens[row, PROMPT:],
                     f"What is {row}+1?", f"answer {row}", float(row % 2))
        for row in range(ROWS)
    ]  # fmt: skip
    made = Rollouts(step=0, trainer_step=1, samples=samples,
                    tensors={"responses": tokens[:, PROMPT:]},
                    sampling={"temperature": 1.0, "top_p": 1.0, "n": 1})  # fmt: skip
    return made, tokens


def run(scratch: Path, device: Device, role: str = "target", steps: int = 1) -> None:
    """Leave in ``scratch`` what a run of a framework would."""
    with np.errstate(all="ignore"):  # faults overflow on purpose
        _run(scratch, device, role, steps)


def _run(scratch: Path, device: Device, role: str, steps: int) -> None:
    made, tokens = rollouts(device.seed)
    tokens = device.fault("tokens", stages.LOG_PROB, lambda t: t)(tokens)
    start = weights(device.seed)
    start = device.fault("weights", stages.LOG_PROB, lambda w: w)(dict(start))
    reference = weights(device.seed)
    rewards = device.fault("rewards", stages.ACTOR_UPDATE, lambda r: r)(
        np.array([s.reward for s in made.samples], F32)
    )
    order = device.faults.get("order", list(range(ROWS)))
    tokens, rewards = tokens[order], rewards[order]
    side = scratch / "side"
    lines(side / "metrics.jsonl", [
        {"step": step, "trainer_step": step + 1, "metrics": {"actor/pg_loss": 0.1 * step}}
        for step in range(steps)
    ])  # fmt: skip
    write_json(side / "parts" / "first_step.json", {"first_step": 1})
    write_json(side / "run.json", {"role": role, "command": ["python", "-m", "trainer"]})
    if role == "benchmark":
        hdf5.write(side / "rollouts" / "step0.h5", made)
    ref = forward(scratch, device, stages.REFERENCE, reference, tokens)
    old = forward(scratch, device, stages.LOG_PROB, start, tokens)
    update(scratch, device, start, tokens, rewards, old, ref)
    parts(side, device, start, reference, tokens, role)
    configuration = {
        "actor": {"optim": {"lr": 1e-3}, "clip_ratio": 0.2},
        "trainer": {"device": "x"},
    }
    configuration |= device.faults.get("configuration", {})
    write_json(scratch / "dump" / "configurations.json", configuration)


def forward(
    scratch: Path, device: Device, stage: str, parameters: dict[str, Array], tokens: Array
) -> Array:
    dump, found = Dump(), []
    temperature = device.fault("temperature", stage, 1.0)
    shift = device.fault("label shift", stage, 0)
    size = device.faults.get("micro", MICRO)
    for micro in range(ROWS // size):
        rows = tokens[micro * size : (micro + 1) * size]
        logits = Model(device, parameters, stage, dump).logits(rows)
        labels = np.roll(rows, -1 - shift, axis=1)
        logs = tape.picked_log_probs(logits, labels, temperature)
        logs.value = device.fault("answers", stage, lambda y: y)(logs.value)
        found.append(logs.value)
        if stage == stages.REFERENCE and device.faults.get("saves results"):
            key_data(scratch, "ref_log_prob", micro, logs.value)
        if stage == stages.LOG_PROB:
            key_data(scratch, "old_log_probs", micro, logs.value)
            entropy = device.fault("entropies", stage, lambda h: h)(logs.entropy)  # type: ignore[attr-defined]
            key_data(scratch, "entropys", micro, entropy)
            key_data(scratch, "prompts", micro, rows[:, :PROMPT])
            key_data(scratch, "responses", micro, rows[:, PROMPT:])
            key_data(scratch, "input_ids", micro, rows)
            if device.faults.get("padding"):  # the first token of every prompt is none
                valid = np.ones(rows.shape, np.int64)
                valid[:, 0] = 0
                key_data(scratch, "attention_mask", micro, valid)
    dump.write(scratch / "dump" / stage / "step0" / "rank0")
    whole = np.concatenate(found)
    hand_back = device.fault("handed back", stage)
    if hand_back is not None and stage == stages.LOG_PROB:
        for micro, part in enumerate(np.split(hand_back(whole), ROWS // size)):
            key_data(scratch, "handed_old_log_probs", micro, part)
    return whole


def update(
    scratch: Path, device: Device, start: dict[str, Array], tokens: Array, rewards: Array,
    old: Array, ref: Array,
) -> None:  # fmt: skip
    stage, dump = stages.ACTOR_UPDATE, Dump()
    advantage = (rewards - rewards.mean()) / (rewards.std() + F32(1e-6))
    advantage = device.fault("advantages", stage, lambda a: a)(advantage).astype(F32)
    response = np.arange(TOKENS)[None] >= PROMPT - 1
    response = response & (np.arange(TOKENS)[None] < TOKENS - 1)
    total: dict[str, Array] = {}
    size = device.faults.get("micro", MICRO)
    for micro in range(ROWS // size):
        part = slice(micro * size, (micro + 1) * size)
        model = Model(device, start, stage, dump)
        rows = tokens[part]
        labels = np.roll(rows, -1 - device.fault("label shift", stage, 0), axis=1)
        logs = tape.picked_log_probs(
            model.logits(rows), labels, device.fault("temperature", stage, 1.0)
        )
        if device.faults.get("saves results"):
            key_data(scratch, "update_log_probs", micro, logs.value)
        ratio = np.exp(logs.value - old[part])
        a = advantage[part, None]
        scale = device.fault("loss scale", stage, 1.0) / (int(response.sum()) * ROWS)
        kl = 1.0 - np.exp(ref[part] - logs.value)
        by_log = (-a * ratio + 0.01 * kl) * response * F32(scale)
        by_log = device.fault("loss gradient", stage, lambda g: g)(by_log)
        loss = Node(np.float32((-a * ratio * response).sum() * scale), (logs,),
                    functools.partial(_times, by_log))  # fmt: skip
        dump.debug[f"loss.pg_loss.{micro}.debug"] = {"type": "float", "value": float(loss.value)}
        difference = float(((old[part] - logs.value) * response).mean())
        dump.debug[f"loss.ppo_kl.{micro}.debug"] = {"type": "float", "value": difference}
        tape.backward(loss)
        said = device.fault("said advantages", stage, lambda a: a)(np.repeat(a, RESPONSE, 1))
        key_data(scratch, "advantages", micro, said)
        key_data(scratch, "token_level_rewards", micro, np.repeat(rewards[part, None], RESPONSE, 1))
        for name, node in model.nodes.items():
            assert node.grad is not None
            own = node.grad
            harm = device.fault(f"weight gradient {name}", stage)
            own = own if harm is None else harm(own).astype(F32)
            total[name] = own if name not in total else total[name] + own
            accumulate = device.fault("accumulate", stage)
            if accumulate is not None:
                total[name] = accumulate(total[name]).astype(F32)
            module, _, index = name.rpartition(".")
            kind = "Linear" if "proj" in name or "head" in name else "RMSNorm"
            kind = "Embedding" if "embed" in name else kind
            dump.data.setdefault(f"Module.{module}.{kind}.parameters_grad.{micro}", {})[index] = [
                leaf(total[name])
            ]
    optimize(device, dump, start, total)
    dump.write(scratch / "dump" / stage / "step0" / "rank0")


def optimize(
    device: Device, dump: Dump, start: dict[str, Array], gradients: dict[str, Array]
) -> None:
    stage = stages.ACTOR_UPDATE
    reduce = device.fault("reduce", stage, lambda g: g)
    gradients = {name: reduce(g).astype(F32) for name, g in gradients.items()}
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    clip = device.fault("clip", stage, min(1.0, 1.0 / (norm + 1e-6)))
    clipped = {name: (g * F32(clip)).astype(F32) for name, g in gradients.items()}
    for name, g in gradients.items():
        dump.debug[f"{name}.grad_reduced.0.debug"] = leaf(g)
    for name, g in clipped.items():
        dump.debug[f"{name}.grad_clipped.0.debug"] = leaf(g)
    rate = F32(device.fault("learning rate", stage, 1e-3))
    decay = F32(device.fault("weight decay", stage, 0.01))
    for name, g in clipped.items():
        old = start[name]
        if device.faults.get("sgd"):
            new = old - rate * g
        else:
            step = g / (np.sqrt(g * g) + F32(1e-8))
            new = old * (1 - rate * decay) - rate * step
        further = device.fault(f"step {name}", stage)
        new = new if further is None else old + further * (new - old)
        new = device.fault("keep", stage, lambda w: w)(new)
        dump.debug[f"{name}.change.0.debug"] = leaf((new - old).astype(F32))


def parts(
    side: Path, device: Device, start: dict[str, Array], reference: dict[str, Array],
    tokens: Array, role: str,
) -> None:  # fmt: skip
    turned = (stages.ACTOR_UPDATE,) if device.faults.get("rows of the update") else ()
    for owner, found, entered in (
        ("actor", start, (stages.LOG_PROB, stages.ACTOR_UPDATE)),
        ("ref", reference, (stages.REFERENCE,)),
    ):
        lines(side / "parts" / "weights" / f"{owner}-rank0.jsonl", [
            {"step": number, "stage": stage, "role": owner, "rank": 0, "name": name,
             "dtype": device.faults.get("kept in", "torch.float32") if owner == "actor"
             else "torch.float32", "shape": list(value.shape), "local_shape": list(value.shape),
             "digest": "sha256:" + hashlib.sha256(
                 value.tobytes() + bytes(device.faults.get("steps read", {}).get(
                     (number, stage, name), step))).hexdigest(),
             "norm": float(np.linalg.norm(value)), "sketch": sketch.sketch(value).tolist(),
             "complete": True}
            for number in (0, 1)
            # the actor's weights move between the steps, unless a fault holds them back
            for step in [number if owner == "actor" and not device.faults.get("stale") else 0]
            for stage in entered for name, value in found.items()
        ])  # fmt: skip
        digests = [
            Sample.build("x", "p", row[:PROMPT], row[PROMPT:]).sample_digest for row in tokens
        ]
        if not device.faults.get("no proof"):
            lines(side / "parts" / "samples" / f"{owner}-rank0.jsonl", [
                {"step": 0, "stage": stage, "rank": 0,
                 "samples": digests[::-1] if stage in turned else digests} for stage in entered
            ])  # fmt: skip
        write_json(side / "parts" / "layout" / f"{owner}-rank0.json",
                   {"role": owner, "rank": 0, "world_size": 1,
                    "backend": device.faults.get("backend")})  # fmt: skip
        write_json(side / "parts" / "environment" / f"{owner}-rank0.json", {
            "device": "cpu", "device_name": "numpy", "versions": {"numpy": "2"},
            "variables": {"KERNELS": "split"} if device.split else {}, "switches": {"tf32": False},
            "code": device.faults.get("code", {}).get(role, {}),
            "dropout": device.faults.get("dropout", {}),
        })  # fmt: skip

    kept = device.faults.get("buffers", {})
    for owner in sorted({role for role, _ in kept}):
        lines(side / "parts" / "buffers" / f"{owner}-rank0.jsonl", [
            {"step": 0, "stage": stage, "role": owner, "rank": 0, "buffers": found}
            for (role, stage), found in kept.items() if role == owner
        ])  # fmt: skip
    for rank, told in device.faults.get("told", {}).items():
        lines(side / "parts" / "optimizers" / f"actor-rank{rank}.jsonl", [
            {"step": step, "stage": stages.ACTOR_UPDATE, "update": number, "groups": groups}
            for (step, number), groups in told.items()
        ])  # fmt: skip


def key_data(scratch: Path, name: str, micro: int, value: Array) -> None:
    directory = scratch / "dump" / "data" / name / "step0" / "rank0" / f"micro_step{micro}"
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / f"{name}.npy", value)
    write_json(directory / f"{name}.json", {"data": {"shape": list(value.shape)}})


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def lines(path: Path, values: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
