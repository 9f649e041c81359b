"""The options of a model replica that each of its ranks reads: what it loads, on what, and how large its tables are.

Part of `cluster.config.EngineConfig`, which travels to the ranks whole. Imports neither torch nor ray.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workers.kept_weights import WeightsOption

DEMO_MODEL = "demo"
"""The name that stands for the model embedded in `configs/demo/`."""

Bytes = Annotated[int, Meta(ge=1)]
"""An option whose name ends in `_bytes` may also be a size, such as `512MiB` (2^20) or `1GB` (10^9)."""
Count = Annotated[int, Meta(ge=1)]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine that each of its ranks reads."""

    model: str = DEMO_MODEL
    """Folder with `config.json` and safetensors, a Hugging Face hub id, or `demo`. `ID@REVISION` is a commit, tag or
    branch of a hub id; only a commit is the same files for ever.
    """
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto` takes the checkpoint's dtype (float16 becomes bfloat16). `float16` is for CUDA GPUs; in a model that was
    trained in bfloat16 it may overflow, which ends the sequence with an error.
    """
    weights: WeightsOption = "auto"
    """How linears keep their weights. `auto`: as the checkpoint stores them. `int8` and `int4` round those that are
    stored in floating point to integers at load, on CPUs: with `int8` a step of one sequence is nearly twice as fast as
    in bfloat16; `int4` is faster still and loses quality. `dense` keeps all in `dtype`, integers of a quantised
    checkpoint too, and activations are not rounded then.
    """
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """`auto` takes CUDA GPUs if the cluster has any when the application starts, else CPUs; without Ray, a GPU if this
    process sees one. With `cuda` each engine, or each of its ranks, claims one GPU from Ray and sees no other one. With
    `tpu` each engine has one process for each host, which claims all of the host's chips from Ray.
    """
    num_threads: Count | None = None
    """CPU threads of the model, of each rank where there are several. They are claimed from Ray as CPUs. None takes
    every core this process may use, shared with the other ranks and engines of its node.
    """
    tensor_parallel_size: Count = 1
    """Ranks that share every matrix of the model, each a Ray actor; 1 runs the model in the engine's own process. With
    device `tpu`, the chips that share it.
    """
    tpu_chips_per_host: Count = 8
    """Chips of each TPU host. An engine with more chips has a Ray actor for each host; with fewer, the engine's own
    process has them.
    """
    max_model_len: Count | None = None
    """Longest prompt plus output, in tokens; None takes the checkpoint's, cut to what the KV cache holds."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens a KV block."""
    kv_cache_bytes: Bytes | None = None
    """Memory of the KV cache, of each rank's share where there are several. It fills up with what may be asked again;
    None leaves it to `kv_cache_fraction`.
    """
    kv_cache_fraction: Annotated[float, Meta(gt=0, le=0.95)] | None = None
    """Share of the memory free after loading that the KV cache takes. None takes 4 times the weights, or room for 512
    tokens of each of `max_num_sequences`, whichever is more; but at most room for all of them at full length 4 times
    over, and at most 40% of what is free. Exactly: `workers/checkpoints/memory.py`.
    """
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    """Token budget of one step, prefill and decode together."""
    max_num_sequences: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Sequences running at a time."""
    logits_processors: dict[str, str | None] = {}
    """Logits processors that HTTP requests may use: a name to the `module:attribute` of its factory, or to null for the
    one that an installed package registers under this name.
    """

    @property
    def num_ranks(self) -> int:
        """Processes that share the model: one for each CPU or GPU rank, or for each TPU host."""
        if self.device == "tpu":
            return -(-self.tensor_parallel_size // self.tpu_chips_per_host)
        return self.tensor_parallel_size
