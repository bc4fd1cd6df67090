"""Defaults that slime forces on Megatron, under the name that each version calls."""

from slime.utils.version import is_old


def _set_default_megatron_args(args):
    args.bf16 = not args.fp16
    return args


set_default_megatron_args = _set_default_megatron_args


def with_defaults(args):
    return set_default_megatron_args(args) if is_old() else _set_default_megatron_args(args)
