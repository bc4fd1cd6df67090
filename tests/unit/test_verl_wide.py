"""Does an fp64 forward stay fp64 where models cast to fp32?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlprobe.frameworks.verl import wide  # noqa: E402

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def norm(x: Any) -> Any:
    """As in Llama and Qwen."""
    h = x.to(torch.float32)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def softmax(x: Any) -> Any:
    return torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


def angles(x: Any) -> Any:
    places = torch.arange(6)[None, :]
    return (x.float() @ places.float().T).cos().to(x.dtype)


@pytest.mark.parametrize("model", [norm, softmax, angles])
def test_casts_to_fp32_lose_nothing(model: object) -> None:
    narrow = model(X)  # type: ignore[operator]
    with wide.Wide():
        kept = model(X)  # type: ignore[operator]
        kept_dtype = X.float().dtype, X.to(dtype=torch.float32).dtype
    assert kept_dtype == (torch.float64, torch.float64)
    assert kept.dtype == torch.float64
    off = (kept - narrow).abs().max()
    assert 1e-9 < off < 1e-5, "fp32 rounds at about 6e-8 of each value"
    assert torch.equal(kept.to(torch.float32).double(), kept) is False


def test_other_numbers_and_other_casts_are_left_alone() -> None:
    with wide.Wide():
        assert X.to(torch.float16).dtype == torch.float16
        assert X.to(torch.float16).float().dtype == torch.float32
        assert torch.zeros(2).dtype == torch.float32


def test_only_an_fp64_engine_is_widened() -> None:
    for dtype, kept in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        with wide.around(SimpleNamespace(_autocast_dtype=dtype)):
            assert X.float().dtype == kept
    with wide.around(SimpleNamespace()):
        assert X.float().dtype == torch.float32


def test_verls_table_learns_fp64_and_forgets_nothing() -> None:
    class PrecisionType:
        @staticmethod
        def to_dtype(precision: object) -> Any:
            if precision == "fp32":
                return torch.float32
            raise RuntimeError(f"unexpected precision: {precision}")

        @staticmethod
        def to_str(precision: object) -> str:
            if precision == torch.float32:
                return "fp32"
            raise RuntimeError(f"unexpected precision: {precision}")

    wide.teach(SimpleNamespace(PrecisionType=PrecisionType))  # type: ignore[arg-type]
    for name in ("fp64", "float64", torch.float64):
        assert PrecisionType.to_dtype(name) == torch.float64
    assert PrecisionType.to_str(torch.float64) == "fp64"
    assert (PrecisionType.to_dtype("fp32"), PrecisionType.to_str(torch.float32)) == (
        torch.float32,
        "fp32",
    )
    with pytest.raises(RuntimeError, match="unexpected precision: fp8"):
        PrecisionType.to_dtype("fp8")
