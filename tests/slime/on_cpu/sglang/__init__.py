"""Names of SGLang that slime imports, with nothing behind them: a replay starts no engine."""

import sys
import types


class ServerArgs:
    """The engine's flags that slime reads."""

    @staticmethod
    def add_cli_args(parser):
        for name in ("data", "pipeline", "expert"):
            parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
        for name in ("enable-dp-attention", "enable-deterministic-inference"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--context-length", type=int)


def _module(name, **names):
    made = sys.modules[f"sglang.{name}"] = types.ModuleType(f"sglang.{name}")
    made.__path__ = []
    made.__dict__.update(names)


class Unused:
    """Stands for a class of the engine."""


def unused(*args, **kwargs):
    raise RuntimeError("no engine is to be started here")


_module("srt")
_module("srt.server_args", ServerArgs=ServerArgs)
_module("srt.utils", kill_process_tree=unused, MultiprocessingSerializer=Unused)
_module("srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
_module("srt.weight_sync")
_module("srt.weight_sync.tensor_bucket", FlattenedTensorBucket=Unused)
_module(
    "srt.constants",
    **{f"GPU_MEMORY_TYPE_{kind}": kind.lower() for kind in ("CUDA_GRAPH", "KV_CACHE", "WEIGHTS")},
)
