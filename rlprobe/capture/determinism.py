"""Determinism: one table of variables and switches per device kind.

For the host that starts a run and the process in it. Importing this module needs the standard
library only; :func:`environment` is used where torch is not installed. The rows and their reasons
are repeated in docs/capture.md, which a test compares.

Sources: torch's notes on reproducibility and on numerical accuracy; torch_npu 2.13
(``torch_npu/npu/npu_config.py``); Huawei's CANN documentation of environment variables.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from typing import Any

from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """An environment variable; libraries read many of them once, when they are loaded."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Switch:
    """A setting of torch's or torch_npu's, made in the process.

    One that the installed version does not have is left out, and recorded as absent.
    """

    #: Dotted path below ``torch``: an attribute to set, or with ``call`` a function to call.
    path: str
    value: Any
    why: str
    #: Keyword of the function that takes the value; None for an attribute.
    call: str | None = None
    #: Name of torch_npu's option that tells what was set, where the attribute cannot be read.
    option: str | None = None
    #: Dotted path below ``torch`` of the enumeration that ``value`` names a member of.
    member_of: str | None = None

    @property
    def shown(self) -> str:
        """As it is written in Python."""
        if self.member_of is not None:
            return f"torch.{self.path} = torch.{self.member_of}.{self.value}"
        if self.call is None:
            return f"torch.{self.path} = {self.value!r}"
        given = f"{self.call}={self.value!r}" if self.call else repr(self.value)
        return f"torch.{self.path}({given})"


@dataclass(frozen=True)
class Determinism:
    """What makes one kind of device repeat itself, and round no more than its dtypes say."""

    variables: tuple[Variable, ...]
    #: Made after msprobe's ``seed_all``, in this order.
    switches: tuple[Switch, ...] = ()


#: Python's own hash order decides the order of sets of strings.
_EVERYWHERE = (
    Variable("PYTHONHASHSEED", "0", "order of sets and of dict keys made from them"),
    Variable(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "0",
        "vLLM schedules requests in the order they arrive only in the caller's process",
    ),
)
#: On every device, so that two devices' records of them are comparable.
_FULL_PRECISION = (
    Switch(
        "set_float32_matmul_precision",
        "highest",
        "fp32 products round no factors (TF32, bf16)",
        call="",
    ),
    Switch("backends.cuda.matmul.allow_tf32", False, "the same, as older code asks for it"),
    Switch("backends.cudnn.allow_tf32", False, "so do convolutions, where TF32 is the default"),
    Switch(
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        False,
        "split fp16 sums are added up in fp32",
    ),
    Switch(
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        False,
        "split bf16 sums likewise",
    ),
)

TABLE: dict[str, Determinism] = {
    "cpu": Determinism(
        variables=(
            *_EVERYWHERE,
            Variable(
                "MKL_DYNAMIC",
                "FALSE",
                "MKL must not choose another number of threads, hence of partial sums",
            ),
            Variable("OMP_DYNAMIC", "FALSE", "nor may OpenMP"),
        ),
        switches=_FULL_PRECISION,
    ),
    "cuda": Determinism(
        variables=(
            *_EVERYWHERE,
            Variable(
                "CUBLAS_WORKSPACE_CONFIG",
                ":4096:8",
                "cuBLAS repeats itself over several streams only with a workspace of fixed size "
                "(torch's deterministic mode refuses to run without it)",
            ),
            Variable(
                "NCCL_ALGO", "Ring", "collectives sum in the order of the ring, whatever the load"
            ),
            Variable(
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "Transformer Engine's attention backward"
            ),
            Variable(
                "FLASH_ATTENTION_DETERMINISTIC",
                "1",
                "flash-attention's backward sums with atomics otherwise (read by transformers)",
            ),
        ),
        switches=(
            *_FULL_PRECISION,
            Switch("backends.cudnn.deterministic", True, "cuDNN takes kernels that repeat"),
            Switch("backends.cudnn.benchmark", False, "and none by a race of timings"),
        ),
    ),
    "npu": Determinism(
        variables=(
            *_EVERYWHERE,
            Variable(
                "HCCL_DETERMINISTIC",
                "strict",
                "collectives reduce every bit in one order; where a product has no strict mode, "
                "CANN takes it for `true`",
            ),
            Variable("LCCL_DETERMINISTIC", "1", "so do those within a node"),
            Variable(
                "CLOSE_MATMUL_K_SHIFT",
                "1",
                "cores would begin a product's sum at different places",
            ),
            Variable("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", "likewise in ATB"),
            Variable(
                "ATB_LLM_LCOC_ENABLE",
                "0",
                "overlapping computation and communication reorders sums",
            ),
            Variable(
                "INF_NAN_MODE_ENABLE",
                "1",
                "overflow becomes infinity as on a GPU, and no largest number",
            ),
        ),
        switches=(
            *_FULL_PRECISION,
            Switch(
                "npu.matmul.allow_hf32",
                False,
                "fp32 products keep fp32 factors, not HF32",
            ),
            Switch("npu.conv.allow_hf32", False, "so do convolutions, where HF32 is the default"),
            Switch(
                "npu.matmul.cube_math_type",
                "KEEP_DTYPE",
                "the same for every product, whatever asked for HF32 or fp16 before",
                member_of="npu.CubeMathType",
            ),
            Switch(
                "npu.config.allow_internal_format",
                False,
                "weights keep their layout, so that products sum in one order",
                option="ALLOW_INTERNAL_FORMAT",
            ),
            Switch(
                "npu.set_compile_mode",
                False,
                "the binary kernels of the release, none compiled for a shape",
                call="jit_compile",
                option="jitCompile",
            ),
            Switch(
                "npu.set_option",
                {"ACL_PRECISION_MODE": "must_keep_origin_dtype"},
                "no operator computes fp32 in fp16",
                call="",
                option="ACL_PRECISION_MODE",
            ),
        ),
    ),
}

_applied: dict[str, Any] | None = None


def table(device: str) -> Determinism:
    """The table of a device kind.

    Raises:
        ConfigError: no table of that name.
    """
    if device not in TABLE:
        raise ConfigError(f"device {device!r} is unknown; accepted: {', '.join(TABLE)}")
    return TABLE[device]


def environment(device: str) -> dict[str, str]:
    """Variables that must stand in a process's environment before it starts.

    Raises:
        ConfigError: the device kind is unknown.
    """
    return {variable.name: variable.value for variable in table(device).variables}


def apply(session: Session) -> dict[str, Any]:
    """Make this process deterministic if the session asks for it; again does nothing.

    Variables that the process lacks are set (libraries not loaded yet will read them; one that the
    alignment's ``environment`` gave another value keeps it), then msprobe's
    ``seed_all(seed, mode=True)`` seeds Python, numpy and torch and switches torch's deterministic
    algorithms on, then the table's own switches follow.

    Returns:
        what was done, as it is recorded: ``deterministic``, ``seed``, ``late`` (variables that had
        to be set here, after interpreter start), ``overruled`` (variables with another value than
        the table's), ``switches`` (each with its value as it is read back) and ``absent`` (switches
        that the installed version does not have).
    """
    global _applied
    if not session.deterministic:
        return {"deterministic": False}
    if _applied is not None and _applied["seed"] == session.seed:
        return _applied
    wanted = environment(session.device)
    late = [name for name in wanted if name not in os.environ]
    kept = {name: os.environ.get(name, value) for name, value in wanted.items()}
    from msprobe.pytorch import seed_all

    os.environ.update(kept)
    seed_all(seed=session.seed, mode=True)
    # It writes some of the same variables with values of its own, which processes started from
    # here would inherit: the table stands.
    os.environ.update(kept)
    switches, absent = _switched(table(session.device).switches)
    _applied = {
        "deterministic": True,
        "seed": session.seed,
        "late": late,
        "overruled": {name: kept[name] for name in kept if kept[name] != wanted[name]},
        "switches": switches,
        "absent": absent,
    }
    return _applied


def applied() -> dict[str, Any]:
    """What :func:`apply` did in this process, for the record."""
    return dict(_applied) if _applied is not None else {"deterministic": False}


def _switched(switches: tuple[Switch, ...]) -> tuple[dict[str, Any], list[str]]:
    """Make the switches; each one's value as it is read back, and the paths that are not there."""
    found: dict[str, Any] = {}
    absent = []
    for switch in switches:
        owner_path, _, last = switch.path.rpartition(".")
        owner = _at(owner_path)
        if owner is None or not _has(owner, last, switch):
            absent.append(switch.path)
            continue
        if switch.call is None:
            setattr(owner, last, _value(switch))
        elif switch.call:
            getattr(owner, last)(**{switch.call: switch.value})
        else:
            getattr(owner, last)(switch.value)
        found[switch.path] = _read_back(owner, last, switch)
    return found, absent


def _at(path: str) -> Any:
    """What stands at a dotted path below torch; None where the installed version lacks it."""
    import torch

    parts = path.split(".") if path else []
    return functools.reduce(lambda owner, part: getattr(owner, part, None), parts, torch)


def _value(switch: Switch) -> Any:
    """The value, or the member of torch_npu's enumeration that it names."""
    return switch.value if switch.member_of is None else _at(f"{switch.member_of}.{switch.value}")


def _has(owner: Any, name: str, switch: Switch) -> bool:
    # an older torch_npu takes any name and forgets it: there is no enumeration then
    if switch.member_of is not None and _value(switch) is None:
        return False
    # torch_npu's settings answer only to their own name, and one that is set alone to none at all
    return hasattr(owner, name) or (switch.call is None and switch.option is not None)


def _read_back(owner: Any, name: str, switch: Switch) -> Any:
    if switch.option is not None:
        return npu_option(switch.option)
    if switch.call is None:
        found = getattr(owner, name)
        return getattr(found, "name", None) if switch.member_of is not None else found
    getter = getattr(owner, name.replace("set_", "get_", 1), None)
    return switch.value if getter is None else getter()


def npu_option(name: str) -> str | None:
    """An option of torch_npu's as its C side knows it; None where it does not say.

    ``torch_npu._C._npu_getOption`` has no public counterpart.
    """
    extension = getattr(sys.modules.get("torch_npu"), "_C", None)
    getter = getattr(extension, "_npu_getOption", None)
    value = getter(name) if getter is not None else None
    return value.decode() if isinstance(value, bytes) and value else None
