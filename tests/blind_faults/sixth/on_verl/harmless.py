"""What a correct device may do otherwise."""

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign

L = "model.layers."


@benign()
def products_in_three_parts(site: Site):
    right = torch.nn.functional.linear

    def parts(x, weight, bias=None):
        n = x.shape[-1]
        a, b = n // 4, n // 2
        y = (
            right(x[..., b:], weight[:, b:])
            + right(x[..., a:b], weight[:, a:b])
            + right(x[..., :a], weight[:, :a])
        )
        return y if bias is None else y + bias

    with swapped(torch.nn.functional, "linear", parts):
        yield


@benign()
def norms_by_division(site: Site):
    import transformers.models.qwen2.modeling_qwen2 as file

    def forward(self, x):
        d = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + self.variance_epsilon)
        return self.weight * (x / root).to(d)

    with swapped(file.Qwen2RMSNorm, "forward", forward):
        yield


@benign()
def softmax_in_base_two(site: Site):
    right = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        if x.dim() != 4:
            return right(x, dim=dim, dtype=dtype)
        x = x.to(dtype) if dtype is not None else x
        e = torch.exp2((x - x.amax(dim=dim, keepdim=True)) * 1.4426950408889634)
        return e / e.sum(dim=dim, keepdim=True)

    with swapped(torch.nn.functional, "softmax", softmax):
        yield


@benign()
def log_probs_by_log_softmax(site: Site):
    import verl.utils.torch_functional as tf
    import verl.workers.engine.fsdp.transformer_impl as impl

    def other(logits, labels, **kw):
        return tf.logprobs_from_logits_naive(logits, labels)

    with swapped(impl, "logprobs_from_logits", other):
        yield


@benign(needs={"world_size": 2})
def ranks_reduced_in_double(site: Site):
    import torch.distributed as dist

    right = dist.reduce_scatter_single

    def other(output, input, group=None, op=None, async_op=False):
        wide, out = input.to(torch.float64), output.to(torch.float64)
        done = right(output=out, input=wide, group=group, op=op, async_op=async_op)
        output.copy_(out)
        return done

    with swapped(dist, "reduce_scatter_single", other):
        yield
