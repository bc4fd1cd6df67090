"""What a stage leaves beside its modules: weights, changes, gradients, losses, samples, memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe import sketch  # noqa: E402
from rlprobe.capture.light.token_sketches import K as TOKEN_K  # noqa: E402
from rlprobe.capture.recorder import Recorder  # noqa: E402
from rlprobe.errors import ConfigError, RunError, UsageError  # noqa: E402
from tests.unit.capture_helpers import (  # noqa: E402
    UPDATE,
    Tiny,
    dump,
    make,
    rank_dir,
    recorder,
    session,
    tokens,
)

LOG_PROB = "actor_compute_log_prob"


def lines(root: Path, kind: str, name: str = "actor-rank0") -> list[dict[str, Any]]:
    path = root / "side/parts" / kind / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def loss_of(model: nn.Module) -> Tensor:
    output = model(tokens())
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens().flatten())


def test_every_parameter_is_described_as_the_stage_begins(tmp_path: Path) -> None:
    model = make(lambda: Tiny(tied=True))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    capture = recorder(tmp_path, provenance=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.stage(UPDATE, 0, 1, model, optimizer=optimizer):
        loss_of(model).backward()
        optimizer.step()
    found = {line["name"]: line for line in lines(tmp_path, "weights")}
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        line = found[name]
        assert line["digest"] == "sha256:" + hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        assert line["shape"] == line["local_shape"] == list(tensor.shape)
        assert line["dtype"] == "torch.float32" and line["complete"] is True
        assert line["norm"] == pytest.approx(float(tensor.norm()), rel=1e-6)
        assert np.allclose(line["sketch"], sketch.sketch(tensor.numpy()), atol=1e-4)
        assert (line["step"], line["stage"], line["role"], line["rank"]) == (0, UPDATE, "actor", 0)


def test_weights_are_described_at_every_captured_step_and_once_in_it(tmp_path: Path) -> None:
    model = make()
    capture = Recorder(session(tmp_path, provenance=True), role="actor", rank=0, world_size=1)
    for step in (0, 0, 1, 2):
        with capture.stage(LOG_PROB, step, step + 1, model), torch.no_grad():
            model(tokens())
    count = len(list(model.parameters()))
    steps = [line["step"] for line in lines(tmp_path, "weights")]
    assert steps == [0] * count + [1] * count + [2] * count


def test_the_digest_depends_on_every_byte_and_on_nothing_else(tmp_path: Path) -> None:
    from rlprobe.capture.weights import digest

    weight = torch.randn(6, 8).bfloat16()
    plain = "sha256:" + hashlib.sha256(weight.view(torch.int16).numpy().tobytes()).hexdigest()
    assert digest(weight) == plain
    assert digest(weight.t().contiguous().t()) == plain
    other = weight.clone()
    other[5, 7] = -other[5, 7] + 1
    assert digest(other) != plain


def test_changes_are_new_minus_old(tmp_path: Path) -> None:
    model = make()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    capture = recorder(tmp_path, provenance=True)
    for _ in range(2):
        with capture.stage(UPDATE, 0, 1, model, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    records = dump(tmp_path, name="debug.json")
    name = "layers.0.up.weight"
    first, second = (records[f"{name}.change.{i}.debug"] for i in (0, 1))
    total = (model.get_parameter(name).detach() - old[name]).numpy()
    summed = sketch.decode(first["Sketch"]) + sketch.decode(second["Sketch"])
    assert np.allclose(summed, sketch.sketch(total), atol=1e-6)
    assert first["Norm"] > 0 and first["shape"] == list(old[name].shape)
    document = json.loads((rank_dir(tmp_path) / "debug.json").read_text())
    assert document["level"] == "debug" and document["framework"] == "pytorch"


def test_half_precision_changes_are_not_rounded_again(tmp_path: Path) -> None:
    model = make()
    model.to(torch.bfloat16)
    with recorder(tmp_path, provenance=True).stage(UPDATE, 0, 1, model):
        with torch.no_grad():
            model.get_parameter("head.weight").fill_(3.0)
            old = 3.0
            model.get_parameter("head.weight").add_(0.015625)
        assert old
    leaf = dump(tmp_path, name="debug.json")["head.weight.change.0.debug"]
    assert leaf["dtype"] == "torch.float32"


def test_inference_stages_record_no_change(tmp_path: Path) -> None:
    with recorder(tmp_path, provenance=True).stage(LOG_PROB, 0, 1, make()):
        pass
    assert not (rank_dir(tmp_path, LOG_PROB) / "debug.json").exists()


def test_gradients_of_each_kind_and_call(tmp_path: Path) -> None:
    model = make()
    seen: list[Tensor] = []
    with recorder(tmp_path).stage(UPDATE, 0, 1, model) as scope:
        for _ in range(2):
            loss_of(model).backward()
            scope.gradients("grad")
            scope.gradients("grad_reduced")
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scope.gradients("grad_clipped")
            gradient = model.get_parameter("head.weight").grad
            assert gradient is not None
            seen.append(gradient.clone())
        with pytest.raises(UsageError, match="grad_reduced"):
            scope.gradients("gradient")
    records = dump(tmp_path, name="debug.json")
    for call, gradient in enumerate(seen):
        clipped = records[f"head.weight.grad_clipped.{call}.debug"]
        assert clipped["Norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)
        assert records[f"head.weight.grad.{call}.debug"]["Norm"] > 100 * clipped["Norm"]
    assert records["head.weight.grad.0.debug"]["Sketch"].startswith("b64:")


def test_losses_and_their_parts(tmp_path: Path) -> None:
    with recorder(tmp_path).stage(UPDATE, 0, 1, make()) as scope:
        scope.loss("total", torch.tensor(1.5))
        scope.loss("kl", 0.25)
        scope.loss("total", torch.tensor(2.5, dtype=torch.bfloat16))
        scope.loss("../../escape now", 1)
    records = dump(tmp_path, name="debug.json")
    assert records["loss.total.0.debug"]["Max"] == 1.5
    assert records["loss.total.1.debug"]["dtype"] == "torch.bfloat16"
    assert records["loss.kl.0.debug"] == {"type": "float", "value": 0.25}
    assert all("/" not in name and " " not in name and ".." not in name for name in records)


def test_samples_are_recorded_on_every_rank_and_stage(tmp_path: Path) -> None:
    chosen = session(tmp_path, provenance=True, ranks=(5,), stages=())
    capture = Recorder(chosen, role="critic", rank=2, world_size=8)
    with capture.stage("critic_update", 1, 2, make()) as scope:
        assert not scope.captured
        scope.samples(["sha256:aa", "sha256:bb"])
    assert lines(tmp_path, "samples", "critic-rank2") == [
        {"step": 1, "stage": "critic_update", "rank": 2, "samples": ["sha256:aa", "sha256:bb"]}
    ]


def test_layout_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("SOME_PASSWORD", "secret")
    layout = {"tp": 2, "pp": 1, "dp": 2, "backend": "megatron"}
    capture = Recorder(session(tmp_path), role="actor", rank=3, world_size=4, layout=layout)
    with capture.stage(UPDATE, 2, 12, make()):
        pass
    parts = tmp_path / "side/parts"
    found = json.loads((parts / "layout/actor-rank3.json").read_text())
    assert found == {
        "role": "actor",
        "rank": 3,
        "world_size": 4,
        "tp": 2,
        "pp": 1,
        "dp": 2,
        "cp": 1,
        "ep": 1,
        "backend": "megatron",
    }
    environment = json.loads((parts / "environment/actor-rank3.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["variables"]["ATEN_CPU_CAPABILITY"] == "default"
    assert "secret" not in json.dumps(environment)
    assert environment["threads"]["intra_op"] == torch.get_num_threads()
    assert environment["kernels"]["cpu_capability"]
    assert 0 < environment["sketch"]["floor"] < 1e-6
    assert json.loads((parts / "first_step.json").read_text()) == {"first_step": 10}


def test_process_memory_of_each_entry(tmp_path: Path) -> None:
    capture = recorder(tmp_path, memory=True)
    for _ in range(2):
        with capture.stage(UPDATE, 0, 1, make()):
            pass
    path = tmp_path / f"dump/memory_snapshot/{UPDATE}/step0/rank0.json"
    entries = json.loads(path.read_text())["entries"]
    assert len(entries) == 2
    assert entries[0]["before"]["resident"] > 1 << 20
    assert entries[0]["after"]["peak"] >= entries[0]["after"]["resident"] // 2


def test_a_devices_snapshot_of_each_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second entry writes over nothing; the calls bind to torch's own signatures."""
    import inspect

    from rlprobe.capture import memory

    class Device:
        """Takes the arguments that ``torch.cuda.memory`` takes, and writes a file."""

        def _record_memory_history(self, *args: Any, **kwargs: Any) -> None:
            inspect.signature(torch.cuda.memory._record_memory_history).bind(*args, **kwargs)

        def _dump_snapshot(self, *args: Any, **kwargs: Any) -> None:
            inspect.signature(torch.cuda.memory._dump_snapshot).bind(*args, **kwargs)
            Path(args[0]).write_bytes(b"snapshot")

    monkeypatch.setattr(memory, "_device_memory", lambda device: Device())
    for _ in range(3):
        with memory.recording(session(tmp_path, memory=True), UPDATE, 0, 1):
            pass
    found = sorted((tmp_path / f"dump/memory_snapshot/{UPDATE}/step0").iterdir())
    assert [file.name for file in found] == ["rank1.pickle", "rank1_1.pickle", "rank1_2.pickle"]


def test_memory_without_layers_says_so(tmp_path: Path) -> None:
    from rlprobe.capture.memory import needs_layers

    assert "reference_dump" in (needs_layers(session(tmp_path, memory=True, stages=())) or "")
    assert needs_layers(session(tmp_path, memory=True)) is None
    assert needs_layers(session(tmp_path, stages=())) is None


def test_a_spent_budget_stops_before_the_next_stage(tmp_path: Path) -> None:
    model = make()
    capture = recorder(tmp_path, budget_mib=1)
    stopped = -1
    for step in range(10):
        try:
            with capture.stage(UPDATE, step, step + 1, model) as scope:
                loss_of(model).backward()
                scope.key_data("values", np.zeros(60_000, dtype=np.float32))
        except RunError as error:
            stopped = step
            assert "1 MiB" in str(error) and f"step {step}" in str(error)
            break
    assert stopped > 1
    for step in range(stopped):
        assert dump(tmp_path, step=step)
    assert not rank_dir(tmp_path, step=stopped).exists()


def test_a_stage_that_has_begun_is_finished_though_the_budget_is_spent(tmp_path: Path) -> None:
    """Generation enters its stage once a request."""
    model = make()
    capture = recorder(tmp_path, budget_mib=1, key_data=True)
    for _ in range(3):
        with capture.stage(UPDATE, 0, 1, model) as scope:
            model(tokens())
            scope.key_data("values", np.zeros(400_000, dtype=np.float32))
    assert "Module.head.Linear.forward.2" in dump(tmp_path)
    for _ in range(2):  # a refused stage has not begun
        with pytest.raises(RunError, match="before step 1"), capture.stage(UPDATE, 1, 2, model):
            pass


def test_tokens_of_every_block_have_sketches(tmp_path: Path) -> None:
    model = make()
    capture = recorder(tmp_path, token_sketch=True)
    seen: list[Tensor] = []
    model.get_submodule("layers.1").register_forward_hook(
        lambda module, args, output: seen.append(output.detach())
    )
    for entry in range(2):
        with capture.stage(LOG_PROB, 0, 1, model) as scope, torch.no_grad():
            scope.micro_step(entry)
            model(tokens())
    with np.load(tmp_path / f"side/token_sketches/{LOG_PROB}-step0-rank0.npz") as stored:
        names = stored["names"].tolist()
        assert names == [
            f"Module.layers.{layer}.Block.forward.{call}.output.0"
            for call in (0, 1)
            for layer in (0, 1)
        ]
        assert int(stored["k"]) == TOKEN_K and int(stored["left_out"]) == 0
        here = (stored["name"] == names.index("Module.layers.1.Block.forward.1.output.0")) & (
            stored["sample"] == 2
        )
        assert stored["token"][here].tolist() == list(range(7))
        assert set(stored["micro_step"][here].tolist()) == {1}
        vector = seen[1][2, 4].numpy() * sketch.base_signs(24)
        expected = np.bincount(np.arange(24) % TOKEN_K, weights=vector, minlength=TOKEN_K)
        assert np.allclose(stored["sketch"][here][4], expected, atol=1e-5)


def test_token_sketches_stay_within_their_budget(tmp_path: Path) -> None:
    capture = recorder(tmp_path, token_sketch=True, token_sketch_mib=0)
    with capture.stage(LOG_PROB, 0, 1, make()) as scope, torch.no_grad():
        assert scope.captured
        make()(tokens())
    assert not (tmp_path / "side/token_sketches").exists()
    model = make()
    with capture.stage(LOG_PROB, 1, 2, model), torch.no_grad():
        model(tokens())
    with np.load(tmp_path / f"side/token_sketches/{LOG_PROB}-step1-rank0.npz") as stored:
        assert int(stored["left_out"]) == 2 * 21 and stored["sketch"].shape == (0, TOKEN_K)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "heavy"}, "light and msprobe"),
        ({"level": "L1"}, "capture.level"),
        ({"task": "tensor"}, "capture.task"),
        ({"summary_mode": "md5"}, "capture.summary_mode"),
        ({"engine": "msprobe", "level": "L2"}, "kernels"),
        ({"engine": "msprobe", "level": "L5"}, "L0, L1, mix"),
        ({"engine": "msprobe", "task": "acc_check"}, "no collector"),
        ({"engine": "msprobe", "task": "nan_check", "level": "L1"}, "npu only"),
        ({"engine": "msprobe", "task": "structure", "level": "L1"}, "L0, mix"),
        ({"engine": "msprobe", "task": "structure", "summary_mode": "md5"}, "summary_mode"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_training(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        recorder(tmp_path, **options)


def test_a_path_that_msprobe_would_refuse_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        recorder(tmp_path / "a b", engine="msprobe")


def test_gradient_norms_of_each_parameter_group(tmp_path: Path) -> None:
    model = make()
    groups = [{"params": [model.embed.weight]}, {"params": list(model.layers.parameters())}]
    optimizer = torch.optim.SGD([*groups, {"params": list(model.head.parameters())}], lr=0.1)
    capture = recorder(tmp_path, key_data=True)
    expected = []
    for _ in range(2):  # two entries of one stage, as of two mini-batches
        with capture.stage(UPDATE, 0, 1, model, optimizer=optimizer) as scope:
            model.head.weight.requires_grad_(False)
            model(tokens()).square().mean().backward()
            layers = torch.cat([p.grad.flatten() for p in model.layers.parameters()])
            expected.append([model.embed.weight.grad.norm().item(), layers.norm().item(), 0.0])
            scope.gradient_norms(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    for number, norms in enumerate(expected):
        place = tmp_path / f"dump/data/actor_grad_norm/step0/rank0/micro_step{number}"
        assert np.allclose(np.load(place / "actor_grad_norm.npy"), norms, rtol=1e-6)
    assert expected[0] != expected[1]


def test_what_an_optimizer_was_told_is_recorded_where_it_changed(tmp_path: Path) -> None:
    model = make()
    layers = list(model.layers.parameters())
    others = [p for p in model.parameters() if all(p is not own for own in layers)]
    optimizer = torch.optim.AdamW(
        [{"params": layers, "lr": torch.tensor(0.25)}, {"params": others, "eps": float("nan")}],
        lr=0.5, foreach=False,
    )  # fmt: skip
    capture = recorder(tmp_path, provenance=True)
    for step, rates in enumerate([(0.5, 0.5, 0.125), (0.125,)]):
        for rate in rates:  # entries of one stage, as of several mini-batches
            optimizer.param_groups[1]["lr"] = rate
            with capture.stage(UPDATE, step, 1 + step, model, optimizer=optimizer) as scope:
                scope.settings(optimizer)
    found = lines(tmp_path, "optimizers")
    assert [(line["step"], line["update"]) for line in found] == [(0, 0), (0, 2), (1, 0)]
    for line, rate in zip(found, (0.5, 0.125, 0.125), strict=True):
        second, first = line["groups"]  # in the order of the model's parameters
        assert {*first["names"], *second["names"]} == {n for n, _ in model.named_parameters()}
        assert all(name.startswith("layers.") for name in first["names"])
        assert (first["settings"]["lr"], second["settings"]["lr"]) == (0.25, rate)
        assert first["settings"]["betas"] == [0.9, 0.999] and second["settings"]["eps"] == "nan"
        assert "foreach" not in first["settings"] and "params" not in first["settings"]
