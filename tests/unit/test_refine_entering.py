"""What enters a trace from outside, what runs on gradients, and what makes no odds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.refine import trace  # noqa: E402
from rlprobe.refine.observe import Observed, observe  # noqa: E402
from tests.unit.capture_helpers import UPDATE, rank_dir, recorder, tokens  # noqa: E402
from tests.unit.traced import first, model, of_masked, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow


def update(
    root: Path,
    *,
    hook: Any = None,
    moving: float = 0.0,
    batch: dict[str, Tensor] | None = None,
    kind: str = "update",
    clip: float = 1.0,
    between: Any = None,
) -> Any:
    """Two micro-batches and a step, with gradients that a device's noise moves."""
    made = model()
    generator = torch.Generator().manual_seed(3)
    if hook is not None:
        for parameter in made.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    chosen = recorder(root, tensors=True, micro_steps=(0,), trace=kind, trace_module=None)
    given = batch or {"weights": torch.ones(3, 7), "mask": torch.ones(3, 7, dtype=torch.bool)}
    with chosen.stage(UPDATE, 0, 1, made, optimizer=optimizer) as scope:
        scope.given(given)
        for index in range(2):
            scope.micro_step(index)
            if between is not None and index:
                between(made)
            logits = made(tokens())
            if moving:
                moved = 1 + moving * torch.randn(logits.shape, generator=generator)
                logits.register_hook(lambda gradient, moved=moved: gradient * moved)
            chosen_ones = torch.log_softmax(logits, -1).gather(-1, tokens()[..., None])[..., 0]
            weights = given["weights"][:] * given["mask"][:]
            loss = -(chosen_ones * weights).sum() / weights.sum().item()
            loss.backward()
            scope.loss("loss", loss)
        scope.gradients("grad_reduced")
        scope.gradient_norms(optimizer)
        torch.nn.utils.clip_grad_norm_(made.parameters(), clip)
        optimizer.step()
    return trace.read(rank_dir(root) / trace.NAME)


def both(tmp_path: Path, noise: float = 0.0, **target: Any) -> Observed:
    kind = target.get("kind", "update")
    sides = update(tmp_path / "b", kind=kind), update(tmp_path / "t", **target)
    return observe(*sides, noise)


def test_noise_of_gradients_does_not_hide_another_clip_norm(tmp_path: Path) -> None:
    found = both(tmp_path, 1e-4, moving=2e-5, clip=0.5)
    assert first(found).said.startswith("factor 0.5 on the target instead of 1"), found
    # said apart, they would: there are more parameters than differences are listed
    assert len(both(tmp_path / "2", 0.0, moving=2e-5).differences) <= 8
    assert both(tmp_path / "3", 1e-4, moving=2e-5).first is None


def test_what_is_done_to_gradients_as_they_are_added_up_is_observed(tmp_path: Path) -> None:
    def rounded(parameter: Any) -> None:
        parameter.grad = parameter.grad.bfloat16().float()

    found = first(both(tmp_path, hook=rounded))
    assert found.cause == "rounding_order" and "AccumulateGrad" in found.said
    scaled = first(both(tmp_path / "2", hook=lambda p: (p.grad.mul_(2.0), None)[1]))
    assert scaled.cause == "constant_factor"
    names = {op.name for op in update(tmp_path / "3").operators if op.node is not None}
    assert "aten::mm" not in names, "a module's backward pass is watched by itself"


def _twice(made: nn.Module) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)


def _forgets_one(made: nn.Module) -> None:
    with torch.no_grad():
        made.layers[0].up.weight.grad[0].zero_()


def _to_no_effect(made: nn.Module) -> None:
    with torch.no_grad():
        made.layers[0].up.weight.grad.mul_(1.0)


@pytest.mark.parametrize(
    ("between", "cause"),
    [(_twice, "accumulation"), (_forgets_one, "accumulation"), (_to_no_effect, None)],
)
def test_what_is_written_between_the_operators_is_observed(
    tmp_path: Path, between: Any, cause: str | None
) -> None:
    found = both(tmp_path, between=between).first
    assert (found and found.cause) == cause, found
    assert found is None or "something outside the operators that were traced" in found.said


@pytest.mark.parametrize(("name", "cause"), [("weights", "data"), ("mask", "label_or_mask_shift")])
def test_what_the_stage_was_given_is_named(tmp_path: Path, name: str, cause: str) -> None:
    other = {"weights": torch.ones(3, 7), "mask": torch.ones(3, 7, dtype=torch.bool)}
    other[name][1, 3:] = 0
    found = first(both(tmp_path, batch=other, kind="outputs"))
    assert found.cause == cause and f"batch {name}, given to" in found.said
    assert both(tmp_path / "2", 1.0, batch=other, kind="outputs").first is None or name == "mask"


@pytest.mark.parametrize(("name", "cause"), [("weights", "data"), ("mask", "label_or_mask_shift")])
def test_a_loss_whose_parts_cancel_hides_nothing_of_what_it_was_given(
    tmp_path: Path, name: str, cause: str
) -> None:
    other = {"weights": torch.ones(3, 7), "mask": torch.ones(3, 7, dtype=torch.bool)}
    right = update(tmp_path / "b", kind="outputs", batch={**other})
    other[name] = other[name].clone()
    other[name][1] = 0
    wrong = update(tmp_path / "t", kind="outputs", batch=other)
    found = first(observe(right, wrong, 1e-5, 3.0))
    assert found.cause == cause and f"batch {name}, given to" in found.said
    near = {"weights": 1 + 1e-6 * torch.randn(3, 7), "mask": torch.ones(3, 7, dtype=torch.bool)}
    assert (
        observe(right, update(tmp_path / "n", kind="outputs", batch=near), 1e-5, 3.0).first is None
    )


def test_a_number_that_code_took_off_a_tensor_leads_to_what_made_it(tmp_path: Path) -> None:
    found = both(tmp_path, kind="outputs", batch={
        "weights": torch.full((3, 7), 2.0), "mask": torch.ones(3, 7, dtype=torch.bool)
    })  # fmt: skip
    # weights are twice as large and cancel: their sum, a plain number by then, is no cause
    assert found.differences[0].said.startswith("batch weights"), found.differences


def test_other_operators_that_make_the_same_numbers_are_no_cause(tmp_path: Path) -> None:
    def benign(y: Tensor) -> Tensor:
        return (y * 2) / 2 + 1.0

    def wrong(y: Tensor) -> Tensor:
        return (y * 2) / 2 + 1.5

    sides = []
    for name, make in (("b", lambda y: y + 1.0), ("same", benign), ("wrong", wrong)):
        sides.append(run(tmp_path / name, wrapped(make))[0])
    assert observe(sides[0], sides[1]).first is None
    assert observe(sides[0], sides[1]).differences, "and are said all the same"
    assert "1.5 on the target instead of 1" in first(observe(sides[0], sides[2])).said


def test_a_unit_of_fsdp_is_run_again_with_its_whole_parameters(tmp_path: Path) -> None:
    """FSDP takes a unit's parameters away in a hook of its own after the forward."""

    def sharded(made: Any) -> None:
        norm = made.layers[1].norm
        whole = norm.weight

        def begins(*_: Any) -> None:
            norm.weight = whole

        def ends(*_: Any) -> None:
            norm.weight = nn.Parameter(torch.zeros(5))

        norm.register_forward_pre_hook(begins)
        norm.register_forward_hook(ends)

    found, _ = run(tmp_path, sharded)
    assert found.again is not None
    assert found.again.failed is None and found.again.wide_failed is None
    assert found.again.repeats is True


class Attends(nn.Module):
    """Adds the mask that it is given to its scores."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.width = width

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        # small, so that a token that is hidden has a weight
        scores = self.inner(x) @ x.transpose(1, 2) / self.width + mask
        return scores.softmax(-1) @ x


@pytest.mark.parametrize(
    ("number", "hidden", "cause"),
    [(-3.4e38, 0, "mask"), (-3.4e38, None, None), (-1e9, None, None)],
)
def test_a_mask_that_comes_in_and_masks_others_is_named(
    tmp_path: Path, number: float, hidden: int | None, cause: str | None
) -> None:
    """One that says "never" with another number masks the same."""

    def masked(value: float, first: int | None) -> Tensor:
        mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), value)
        if first is not None:
            mask[1:, first] = value
        return mask

    def using(mask: Tensor) -> Any:
        def change(made: Any) -> None:
            layer = made.layers[1]
            attends, right = Attends(), layer.norm.forward
            layer.attends = attends
            layer.norm.forward = lambda x: attends(right(x), mask)

        return change

    sides = [
        run(tmp_path / name, using(masked(value, first)), module="layers.1.attends")[0]
        for name, value, first in (("b", -3.4e38, None), ("t", number, hidden))
    ]
    found = observe(sides[0], sides[1], 1e-6, 1e-6, forward=True).first
    assert (found.cause if found else None) == cause, found
    assert cause is None or "masks other elements" in first(observe(sides[0], sides[1])).said


def test_counting_tokens_is_no_shift_of_labels(tmp_path: Path) -> None:
    def by_row(logits: Tensor) -> Tensor:
        picked = tokens()
        chosen = torch.log_softmax(logits, -1).gather(-1, picked[..., None])[..., 0]
        mask = picked > 3
        each = -(chosen * mask).sum(-1) / mask.sum(-1)
        return each.mean()

    losses = {"b": of_masked(lambda m: m), "t": by_row}
    sides = [
        run(tmp_path / name, kind="outputs", module=None, loss=loss)[0]
        for name, loss in losses.items()
    ]
    assert first(observe(sides[0], sides[1])).cause == "implementation"


def test_what_the_other_side_runs_to_no_effect_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Both sides count their tokens, and one does not divide by that."""

    def counted(used: bool) -> Any:
        def loss(logits: Tensor) -> Tensor:
            picked = tokens()
            chosen = torch.log_softmax(logits, -1).gather(-1, picked[..., None])[..., 0]
            number = (picked > 3).roll(1, -1).sum().item()
            return -(chosen.sum() / (number if used else 100))

        return loss

    sides = [
        run(tmp_path / name, kind="outputs", module=None, loss=counted(used))[0]
        for name, used in (("b", True), ("t", False))
    ]
    said = [difference.said for difference in observe(sides[0], sides[1]).differences]
    assert not any("which the target does not" in words for words in said), said
    assert first(observe(sides[0], sides[1])).said.startswith("divisor 100 on the target instead")


def test_what_a_collective_fills_is_described_where_it_is_used(tmp_path: Path) -> None:
    """It is filled after the operator has returned, and its version does not tell."""
    from rlprobe.capture.trace.operators import Operators
    from rlprobe.capture.trace.values import Values

    lines: list[Any] = []

    def write(line: Any) -> bool:
        lines.append(line)
        return True

    values = Values(tmp_path, "trace", lambda _: True, lambda: True)
    mode = Operators(values, lambda: True, write)
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file.name}", rank=0, world_size=1
        )
        try:
            with mode:
                total = torch.full((2,), 3.0)
                memory = total.numpy()
                work = torch.distributed.all_reduce(total, async_op=True)
                work.wait()
                memory[:] = 7.0  # as another rank's share would
                used = total * 2
        finally:
            torch.distributed.destroy_process_group()
    assert used.tolist() == [14.0, 14.0]
    names = [line["name"] for line in lines]
    reduced = lines[names.index("c10d::allreduce_")]
    assert all("digest" not in value for value in reduced["outputs"])
    times = next(line for line in lines if line["name"] == "aten::mul.Tensor")
    given = times["arguments"][0]["tensors"][0]
    assert given["elements"] == [7.0, 7.0] and given["value"] == reduced["outputs"][0]["value"]


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        (lambda whole: whole[10:16], "batch position_ids"),
        (lambda whole: whole[10:16].view(2, 3)[1], "batch position_ids"),
        (lambda whole: whole[1:9:2], "batch input_ids"),
        (lambda whole: whole[4:12], "elsewhere"),  # of both
        (lambda whole: whole[20:], "elsewhere"),
    ],
)
def test_a_batch_in_one_storage_is_named_by_what_a_view_lies_in(
    tmp_path: Path, taken: Callable[[Tensor], Tensor], name: str
) -> None:
    from rlprobe.capture.trace.values import Values

    whole = torch.arange(24)
    values = Values(tmp_path, "trace", lambda _: True, lambda: False)
    values.owner(whole[:1], "batch dummy_tensor")
    values.owner(whole[1:10], "batch input_ids")
    values.owner(whole[10:20], "batch position_ids")
    values.owner(torch.zeros(3), "batch of its own")
    assert values.given(taken(whole))["from"] == name


def test_a_jagged_entry_of_a_batch_in_one_storage_keeps_its_name(tmp_path: Path) -> None:
    from rlprobe.capture.trace.values import Values

    whole = torch.arange(24)
    ids = torch.nested.nested_tensor_from_jagged(whole[10:20], torch.tensor([0, 4, 10]))
    values = Values(tmp_path, "trace", lambda _: True, lambda: False)
    values.owner(whole[:1], "batch dummy_tensor")
    values.owner(ids, "batch position_ids")
    assert values.given(ids)["from"] == "batch position_ids"
    assert values.given(ids.values()[2:4])["from"] == "batch position_ids"


def test_a_batch_that_lies_in_one_storage_is_not_looked_at_by_what_is_traced(
    tmp_path: Path,
) -> None:
    whole = torch.ones(64)
    batch = {
        "dummy_tensor": whole[:1],
        "positions": torch.nested.nested_tensor_from_jagged(whole[1:11], torch.tensor([0, 4, 10])),
        "weights": whole[11:32].view(3, 7),
        "mask": torch.ones(3, 7, dtype=torch.bool),
    }
    operators = update(tmp_path, kind="outputs", batch=batch).operators
    names = {value.origin for op in operators for value in op.inputs}
    assert {"batch weights", "batch mask"} <= names and "batch dummy_tensor" not in names
    assert not any("nested" in op.name for op in operators), "asked by the probe alone"


def _own_rank(parameter: Any) -> None:
    """What lies in a gradient's place, once it was added up, is written over by a part of it."""
    own = parameter.grad.detach().clone() * 1.0
    parameter.grad.copy_(own.flip(0))


def _own_by_views(parameter: Any) -> None:
    flat = parameter.grad.view(-1).clone()
    parameter.grad.view(-1).copy_(flat[: flat.numel() // 2].repeat(2))


def test_what_is_written_over_what_agreed_is_said_before_what_follows(tmp_path: Path) -> None:
    for number, hook in enumerate((_own_rank, _own_by_views)):
        found = first(both(tmp_path / str(number), 1e-5, hook=hook))
        assert "AccumulateGrad" in found.said and found.kind != "kernel", found
        assert "clip_grad" not in found.said, found
