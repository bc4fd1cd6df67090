"""What does the light engine record, under which names, and how do entries of a stage add up?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.capture.recorder import Recorder  # noqa: E402
from tests.unit.capture_helpers import (  # noqa: E402
    UPDATE,
    dump,
    hooks_of,
    leaves,
    make,
    rank_dir,
    recorder,
    session,
    tokens,
)


def loss_of(model: nn.Module) -> Tensor:
    output = model(tokens())
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens().flatten())


def test_every_module_is_recorded_first_and_last_included(tmp_path: Path) -> None:
    model = make()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    data = dump(tmp_path)
    expected = {
        f"Module.{name}.{type(module).__name__}"
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    }
    for direction in ("forward", "backward"):
        found = {key.rpartition(f".{direction}.")[0] for key in data if f".{direction}." in key}
        assert found == expected, direction
    assert "Module.embed.Embedding.forward.0" in data
    assert "Module.head.Linear.parameters_grad.0" in data


def test_inner_modules_stand_before_the_one_that_holds_them(tmp_path: Path) -> None:
    model = make()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    order = list(dump(tmp_path))
    for direction in ("forward", "backward"):
        inner = order.index(f"Module.layers.0.up.Linear.{direction}.0")
        assert inner < order.index(f"Module.layers.0.Block.{direction}.0")
    assert order.index("Module.layers.1.Block.backward.0") < order.index(
        "Module.layers.0.Block.backward.0"
    )


def test_numbers_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = make()
    seen: dict[str, Tensor] = {}
    handle = model.get_submodule("layers.0.up").register_forward_hook(
        lambda module, args, output: seen.update(x=args[0].detach(), y=output.detach())
    )
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    handle.remove()
    record = dump(tmp_path)["Module.layers.0.up.Linear.forward.0"]
    weight = model.get_parameter("layers.0.up.weight")
    for leaf, tensor in (
        (record["input_args"][0], seen["x"]),
        (record["output"][0], seen["y"]),
        (record["parameters"]["weight"], weight.detach()),
    ):
        assert leaf["shape"] == list(tensor.shape)
        assert leaf["Max"] == tensor.max().item()
        assert leaf["Min"] == tensor.min().item()
        assert leaf["Mean"] == tensor.mean().item()
        assert leaf["Norm"] == torch.norm(tensor).item()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_input_gradients_are_the_modules_own_share(tmp_path: Path) -> None:
    """The block's input also feeds the residual; its norm must not be charged with that."""
    reference: dict[str, tuple[Any, Any]] = {}
    model = make()
    handles = [
        module.register_full_backward_hook(
            lambda module, before, after, name=name: reference.update({name: (before, after)})
        )
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    model = make()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    data = dump(tmp_path)
    compared = 0
    for name, (before, after) in reference.items():
        key = f"Module.{name}.{type(model.get_submodule(name)).__name__}.backward.0"
        for slot, gradients in (("output", before), ("input", after)):
            wanted = [g for g in gradients if g is not None]
            assert len(data[key][slot]) == len(wanted), (key, slot)
            for leaf, gradient in zip(data[key][slot], wanted, strict=True):
                assert leaf["Norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
                assert leaf["Max"] == pytest.approx(gradient.max().item(), rel=1e-4, abs=1e-9)
                compared += 1
    assert compared > 15


class Attention(nn.Module):
    """Returns its weights beside its output, as eager attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(24, 24)

    def forward(self, *, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(self.query(hidden) @ hidden.transpose(-1, -2), dim=-1)
        return weights @ hidden, weights


class WithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.attention = Attention()

    def forward(self, ids: Tensor) -> Tensor:
        return self.attention(hidden=self.embed(ids))[0]


def test_outputs_used_inside_and_keyword_inputs(tmp_path: Path) -> None:
    model = make(WithAttention)
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        model(tokens()).square().sum().backward()
    record = dump(tmp_path)["Module.attention.Attention.backward.0"]
    assert record["input"][0]["Norm"] > 0
    # Nothing outside used the weights: their gradient comes from inside the module.
    assert record["input"][1] is None
    # Three uses of one keyword input inside: their sum is what reaches the embedding.
    below = dump(tmp_path)["Module.embed.Embedding.backward.0"]["input"][0]
    assert record["output"][0]["Norm"] == pytest.approx(below["Norm"], rel=1e-6)


class Dead(nn.Module):
    """One of two outputs is computed from the input and thrown away."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2.0, x * 3.0

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = Dead.Two()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.outer = self.Outer()

    def forward(self, ids: Tensor) -> Tensor:
        return self.outer(self.embed(ids))


def test_the_output_is_what_the_caller_gets(tmp_path: Path) -> None:
    """Other forward hooks may change it (FSDP2 casts there)."""
    model = make()
    model.head.register_forward_hook(lambda module, args, output: output * 2)
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        output = model(tokens())
        output.sum().backward()
    data = dump(tmp_path)
    leaf = data["Module.head.Linear.forward.0"]["output"][0]
    assert leaf["Norm"] == torch.linalg.vector_norm(output).item()
    gradient = data["Module.head.Linear.backward.0"]["input"][0]
    assert (gradient["Max"], gradient["Min"]) == (1.0, 1.0), "that of what the caller got"


def test_a_thrown_away_output_does_not_hide_the_input_gradient(tmp_path: Path) -> None:
    model = make(Dead)
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        model(tokens()).sum().backward()
    data = dump(tmp_path)
    assert data["Module.outer.Outer.backward.0"]["output"][0]["Mean"] == 2.0
    assert data["Module.outer.two.Two.backward.0"]["output"][0]["Mean"] == 2.0


def test_a_stage_entered_again_goes_on_in_the_same_files(tmp_path: Path) -> None:
    model = make()
    capture = recorder(tmp_path)
    with capture.stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    first = dump(tmp_path)
    with capture.stage("actor_compute_log_prob", 0, 1, model), torch.no_grad():
        model(tokens())
    with capture.stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    both = dump(tmp_path)
    assert {key: both[key] for key in first} == first
    added = [key for key in both if key not in first]
    assert len(added) == len(first)
    assert all(key.endswith(".1") for key in added)
    stacks = json.loads((rank_dir(tmp_path) / "stack.json").read_text())
    named = [name for names, _ in stacks.values() for name in names]
    assert sorted(named) == sorted(key for key in both if ".forward." in key)
    construct = json.loads((rank_dir(tmp_path) / "construct.json").read_text())
    assert construct["Module.layers.0.up.Linear.forward.1"] == "Module.layers.0.Block.forward.1"
    assert construct["Module.layers.0.up.Linear.backward.1"] == "Module.layers.0.Block.backward.1"
    assert construct["Module.head.Linear.forward.0"] is None


def test_counting_begins_anew_in_the_next_step(tmp_path: Path) -> None:
    model = make()
    capture = recorder(tmp_path)
    for step in (0, 1):
        with capture.stage(UPDATE, step, step + 1, model):
            loss_of(model).backward()
    assert list(dump(tmp_path, step=0)) == list(dump(tmp_path, step=1))


def test_the_stack_names_the_caller_and_nothing_of_ours(tmp_path: Path) -> None:
    model = make()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss_of(model)
    stacks = json.loads((rank_dir(tmp_path) / "stack.json").read_text())
    by_name = {name: lines for names, lines in stacks.values() for name in names}
    lines = by_name["Module.layers.1.up.Linear.forward.0"]
    text = "\n".join(lines)
    assert "self.down(torch.sigmoid(self.gate(h)) * self.up(h))" in text
    assert "x = layer(x)" in text
    assert "output = model(tokens())" in text
    assert "rlprobe/capture" not in text
    # Both calls of a loop have one stack: they come from the same lines.
    assert by_name["Module.layers.0.up.Linear.forward.0"] == lines


def test_an_exception_leaves_the_model_clean_and_nothing_complete(tmp_path: Path) -> None:
    model = make()
    capture = recorder(tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):  # noqa: SIM117
        with capture.stage(UPDATE, 0, 1, model):
            loss_of(model).backward()
            raise RuntimeError("out of memory")
    assert hooks_of(model) == []
    assert not (rank_dir(tmp_path) / "dump.json").exists()
    assert not (tmp_path / "side/parts/captured").exists()


def test_a_failing_entry_takes_the_earlier_ones_along(tmp_path: Path) -> None:
    model = make()
    capture = recorder(tmp_path)
    with capture.stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
    with pytest.raises(IndexError):  # noqa: SIM117
        with capture.stage(UPDATE, 0, 1, model):
            model(torch.full((1, 2), 10**6))
    assert not (rank_dir(tmp_path) / "dump.json").exists()
    assert (rank_dir(tmp_path) / "dump.json.partial").exists()
    with capture.stage(UPDATE, 0, 1, model):  # a retry does not make the stage whole
        loss_of(model).backward()
    assert not (rank_dir(tmp_path) / "dump.json").exists()
    with capture.stage(UPDATE, 1, 2, model):  # the next step is not concerned
        loss_of(model).backward()
    assert dump(tmp_path, step=1)


@pytest.mark.parametrize(
    ("stage", "step", "options"),
    [
        ("critic_update", 0, {}),
        (UPDATE, 10, {}),
        (UPDATE, 0, {"ranks": (1,)}),
        ("actor_generate_sequences", 0, {"stages": ("actor_generate_sequences",)}),
    ],
)
def test_what_is_not_wanted_is_not_touched(
    stage: str, step: int, options: dict[str, Any], tmp_path: Path
) -> None:
    model = make()
    with recorder(tmp_path, **options).stage(stage, step, step + 1, model) as scope:
        assert not scope.captured
        scope.micro_step(0)
        scope.loss("total", 1.0)
        scope.gradients("grad")
        assert hooks_of(model) == []
        loss_of(model).backward()
    assert not list((tmp_path).rglob("*.json"))


def test_only_the_chosen_modules(tmp_path: Path) -> None:
    model = make()
    chosen = recorder(tmp_path, modules=("layers.1.up",))
    with chosen.stage(UPDATE, 0, 1, model) as scope:
        loss_of(model).backward()
        scope.gradients("grad")
    assert {key.split(".Linear.")[0] for key in dump(tmp_path)} == {"Module.layers.1.up"}
    assert set(dump(tmp_path, name="debug.json")) == {"layers.1.up.weight.grad.0.debug"}


def test_a_changed_tensor_at_the_same_address_is_measured_again(tmp_path: Path) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Identity()
            self.second = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x.mul_(2.0)
            return self.second(x)

    model = Doubling()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        model(torch.ones(3, 5))
    data = dump(tmp_path)
    assert data["Module.first.Identity.forward.0"]["output"][0]["Max"] == 1.0
    assert data["Module.second.Identity.forward.0"]["input_args"][0]["Max"] == 2.0


def test_parameters_changed_within_a_stage_are_measured_again(tmp_path: Path) -> None:
    """As FSDP2 does it: new values in the same tensor, without a new version."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss_of(model).backward()
        optimizer.step()
        with (
            torch.no_grad(),
            torch.autograd._unsafe_preserve_version_counter(tuple(model.parameters())),
        ):
            for parameter in model.parameters():
                parameter.add_(1.0)
        loss_of(model).backward()
    data = dump(tmp_path)
    before, after = (
        data[f"Module.layers.0.up.Linear.forward.{i}"]["parameters"]["weight"]["Mean"]
        for i in (0, 1)
    )
    assert after == pytest.approx(before + 1.0, abs=0.1)


class Odd(nn.Module):
    """Passes on whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            self.inner(value)
        return None


def test_tensors_without_statistics_and_with_strange_ones(tmp_path: Path) -> None:
    values = [
        torch.tensor([True, False, True]),
        torch.tensor([3, -2, 7]),
        torch.zeros(0, 4),
        torch.empty(2, 3, device="meta"),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, float("-inf")]),
        torch.full((8, 61), torch.finfo(torch.float32).min),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([3 + 4j]),
        torch.tensor(-2.5),
        torch.tensor(7),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.ones(2).to_sparse(),
    ]
    model = Odd()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        model(*values)
    data = dump(tmp_path)
    leaf = [data[f"Module.inner.Identity.forward.{i}"]["input_args"][0] for i in range(len(values))]
    flag, whole, empty, meta, nan, inf, mask, double, pair, scalar, count, eight, sparse = leaf
    assert (flag["Max"], flag["Min"], flag["Mean"]) == (True, False, None)
    assert (whole["Max"], whole["Min"], whole["Norm"]) == (7, -2, None)
    for none in (empty, meta, eight, sparse):
        assert none["Max"] is None and "Sketch" not in none
    assert nan["NonFinite"] == "nan" and inf["NonFinite"] == "inf"
    assert mask["NonFinite"] == "overflow" and mask["Min"] == torch.finfo(torch.float32).min
    assert all("Sketch" not in bad for bad in (nan, inf, mask))
    assert double["Norm"] == pytest.approx(5**0.5, rel=1e-15) and double["Mean"] == 1.5
    assert pair["Norm"] == 5.0
    assert (scalar["Max"], scalar["Norm"]) == (-2.5, -2.5)  # msprobe's way with single values
    assert (count["Max"], count["Mean"]) == (7, 7)
    for good in (flag, whole, double):
        assert good["Sketch"].startswith("b64:")


def test_arguments_that_are_no_tensors(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def forward(self, **values: Any) -> Tensor:
            return torch.ones(1)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keyed = Keyed()

        def forward(self) -> None:
            loop: list[Any] = []
            loop.append(loop)
            self.keyed(
                number=3,
                text="a",
                flag=True,
                nothing=None,
                cut=slice(1, None),
                dots=...,
                size=torch.Size([2, 3]),
                kind=torch.float16,
                cache=object(),
                loop=loop,
                nested={"a": [torch.ones(2)], 3: (1.5,)},
            )

    with recorder(tmp_path).stage(UPDATE, 0, 1, root := Root()):
        root()
    found = dump(tmp_path)["Module.keyed.Keyed.forward.0"]["input_kwargs"]
    assert found["number"] == {"type": "int", "value": 3}
    assert found["flag"] == {"type": "bool", "value": True}
    assert found["nothing"] is None and found["cache"] is None
    assert found["cut"] == {"type": "slice", "value": [1, None, None]}
    assert found["size"] == {"type": "torch.Size", "value": [2, 3]}
    assert found["kind"] == {"type": "torch.dtype", "value": "torch.float16"}
    assert found["nested"]["a"][0]["Max"] == 1.0
    assert found["nested"]["3"] == [{"type": "float", "value": 1.5}]


def test_generation_records_the_chosen_tokens_only(tmp_path: Path) -> None:
    model = make()
    stage = "actor_generate_sequences"
    capture = recorder(tmp_path, stages=(stage,), token_range=(1, 2))
    with torch.no_grad(), capture.stage(stage, 0, 1, model) as scope:
        for batch in range(2):
            scope.micro_step(batch)
            for _ in range(5):
                model(tokens())
    heads = [key for key in dump(tmp_path, stage) if key.startswith("Module.head.")]
    assert heads == [f"Module.head.Linear.forward.{i}" for i in range(4)]


def test_several_chunks_carry_their_index(tmp_path: Path) -> None:
    chunks: list[nn.Module] = [make(), make()]
    with recorder(tmp_path).stage(UPDATE, 0, 1, chunks) as scope:
        for chunk in chunks:
            loss_of(chunk).backward()
        scope.gradients("grad")
    data = dump(tmp_path)
    assert "Module.0.layers.0.up.Linear.forward.0" in data
    assert "Module.1.layers.0.up.Linear.backward.0" in data
    assert "1.head.weight.grad.0.debug" in dump(tmp_path, name="debug.json")


def test_each_entry_leaves_a_line(tmp_path: Path) -> None:
    model = make()
    capture = Recorder(session(tmp_path), role="actor", rank=0, world_size=1)
    for _ in range(2):
        with capture.stage(UPDATE, 3, 7, model, adapter=False):
            loss_of(model).backward()
    lines = (tmp_path / "side/parts/captured/actor-rank0.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 2
    assert found[0]["stage"] == UPDATE and found[0]["step"] == 3 and found[0]["trainer_step"] == 7
    assert found[0]["adapter"] is False and found[0]["engine"] == "light"
    data = dump(tmp_path, step=3)
    assert sum(line["calls"] for line in found) == len(data)
    assert sum(line["records"] for line in found) == len(leaves(data))
    assert json.loads((tmp_path / "side/parts/first_step.json").read_text()) == {"first_step": 4}
