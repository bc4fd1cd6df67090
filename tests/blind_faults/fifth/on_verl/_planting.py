"""How a kernel below an ATen operator is exchanged, and where."""

import contextlib
import importlib
import os
import warnings

import torch

from rlprobe.faults.patching import swapped


@contextlib.contextmanager
def kernel(*pairs):
    libs = []
    for name, wrong in pairs:
        k = torch.library.get_kernel("aten::" + name, "CPU")
        lib = torch.library.Library("aten", "IMPL")

        def impl(ks, *a, _k=k, _w=wrong, **kw):
            return _w(lambda *b, **c: _k.call_boxed(ks, *b, **c), *a, **kw)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lib.impl(name, impl, "CPU", with_keyset=True, allow_override=True)
        libs.append(lib)
    try:
        yield
    finally:
        for lib in libs:
            lib._destroy()


@contextlib.contextmanager
def flagged(module, flag):
    """flag is non-empty while module's forward runs."""
    right = module.forward

    def forward(*a, **k):
        flag.append(1)
        try:
            return right(*a, **k)
        finally:
            flag.pop()

    with swapped(module, "forward", forward):
        yield


def find(model, end):
    return next(m for n, m in model.named_modules() if n.endswith(end))


def fresh():
    g = torch.Generator()
    g.manual_seed(int.from_bytes(os.urandom(7), "little"))
    return g


def bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


def adam(change):
    file = importlib.import_module("torch.optim.adam")
    right = file.adam
    return swapped(file, "adam", lambda *a, **kw: change(right, *a, **kw))


def local(p):
    return getattr(p, "_local_tensor", p)


def repeated(module, key, value):
    n = module.num_key_value_groups
    return key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)


def for_good(owner, name, change):
    right = getattr(owner, name)
    if not getattr(right, "_planted", False):
        patched = change(right)
        patched._planted = True
        setattr(owner, name, patched)
