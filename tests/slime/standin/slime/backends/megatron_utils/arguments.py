"""Defaults that slime forces on Megatron."""


def set_default_megatron_args(args):
    args.bf16 = not args.fp16
    return args
