"""The options of a model replica that each of its ranks reads: the model, the device and the sizes of tables.

They are part of `manta.cluster.config.EngineConfig`, which is sent to the ranks whole. Imports neither torch nor ray.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from manta.workers.kept_weights import WeightsOption
from manta.workers.pooling_info import TaskOption

DEMO_MODEL = "demo"
"""The name that stands for the model embedded in `configs/demo/`."""

ON_DEMAND_PACKED_BYTES = 32 << 30
"""The `packed_weights_bytes` of models on demand: two of 8 billion parameters in bfloat16, or many small ones."""
Bytes = Annotated[int, Meta(ge=1)]
"""An option whose name ends in `_bytes` may also be a size, such as `512MiB` (2^20) or `1GB` (10^9)."""
Count = Annotated[int, Meta(ge=1)]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine that each of its ranks reads."""

    model: str = DEMO_MODEL
    """Folder with `config.json` and safetensors, a GGUF file, a Hugging Face hub id, or `demo`. `ID@REVISION` selects
    a commit, tag or branch of a hub id. Only a commit always means the same files.
    """
    task: TaskOption = "auto"
    """What the engine answers with. `auto` takes what the checkpoint was published for: text, embeddings, scores or
    labels. `embed` has a model that generates give embeddings instead: the last token's vectors, of length 1.
    `score` has it score pairs of texts by the probability of `yes` against `no`, and `generate` has it write text,
    whatever it was published for.
    """
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of weights and activations. `auto` takes the checkpoint's, except that float16 becomes bfloat16. `float16`
    needs a CUDA GPU, and in a model that was trained in bfloat16 it may overflow, which ends the sequence with an
    error.
    """
    weights: WeightsOption = "auto"
    """Form of the weights of linears.

    `auto` keeps the checkpoint's. `int8` and `int4` round floating-point weights at load, on CPUs and GPUs. On a CPU a
    step of one sequence is nearly twice as fast with `int8` as in bfloat16, and faster still with `int4`, which loses
    quality.
    `dense` keeps all weights in `dtype`, also those of a quantised checkpoint, and rounds no activations.
    `lossless` keeps bfloat16 weights in 12 bits each on a CPU, and gives the tokens of `auto`: from three quarters of
    the bytes, so that steps of few sequences are faster where reading the weights is the limit. Steps of more than six
    take longer.
    """
    exact: bool = False
    """Whether a request with a seed, or a greedy one, gets the same tokens on every machine with CPU kernels. Batch,
    threads, ranks, drafts and prefix cache then change no token. It needs `weights` `int8`
    or `int4`, and a CPU with a C++ compiler. Processors with instructions for bfloat16 then do attention in float32.
    A model that pools needs none of it: each text then runs by itself, and gets the same bits whatever else is in its
    step, on one machine.
    """
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """Device of the model. `auto` takes CUDA GPUs if the cluster has any when the application starts, else CPUs. With
    `cuda`, Ray reserves one GPU for each rank. With `tpu`, an engine has one process for each host, which claims all
    its chips.
    """
    num_threads: Count | None = None
    """CPU threads of the model, for each rank. Ray counts them as claimed CPUs. None takes every core that the process
    may use, shared with the other ranks and engines of its node.
    """
    tensor_parallel_size: Count = 1
    """Ranks that split every matrix of the model. Each is a Ray actor; 1 runs the model in the engine's own process.
    With device `tpu`, chips that split it.
    """
    expert_parallel: bool = False
    """Whether ranks divide a layer's experts, instead of the width of each expert. A rank then holds whole experts, as
    many as every other rank or one more, and computes the tokens that chose them. Ranks split everything else as
    without it, shared experts too. It has no effect with one rank. A model without experts is refused.
    """
    tpu_chips_per_host: Count = 8
    """Chips of each TPU host. An engine with more chips has one Ray actor for each host. With fewer, the engine's own
    process holds them.
    """
    max_model_len: Count | None = None
    """Longest sequence, prompt and output together, in tokens. None takes the checkpoint's, cut to what the KV cache
    holds.
    """
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens of one KV block."""
    kv_cache_dtype: Literal["auto", "int8", "int4"] = "auto"
    """Dtype of cached keys and values. `auto` takes that of the activations. `int8` rounds each token's key and value
    of each head by its largest number, so that the same memory holds nearly twice as many tokens as in bfloat16.
    `int4` rotates them and rounds them to 16 levels, for nearly twice as many tokens again. Both are for CPUs, and not
    for models with ALiBi or Doge's biases.
    """
    kv_cache_bytes: Bytes | None = None
    """Memory of the KV cache, for each rank. It fills up with blocks that later prompts may reuse. None leaves the size
    to `kv_cache_fraction`.
    """
    kv_cache_fraction: Annotated[float, Meta(gt=0, le=0.95)] | None = None
    """Share of the memory free after loading that the KV cache takes. None takes 4 times the weights, or room for 512
    tokens of each of `max_num_sequences`, whichever is more. It never takes more than 40% of the free memory (90% on
    GPUs), nor more than all sequences at full length 4 times over. `workers/checkpoints/memory.py` has the exact rule.
    """
    prefix_store_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of the files in which a node keeps prompts' KV blocks, so that an engine that starts finds those of earlier
    ones. A block is kept from the second request on that begins with it. All engines of the node share the files; the
    least recently used leave first. They lie in the folder `prefixes` of Manta's cache (`MANTA_CACHE`). For CPUs; 0
    keeps none.
    """
    prefix_store_keep_s: Annotated[float, Meta(gt=0)] = 7 * 86_400.0
    """Seconds since its last use after which a kept block counts no more. It is removed within an hour, if an engine
    runs.
    """
    packed_weights_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Size of the files in which a node keeps packed weights, so that an engine that starts maps what an earlier one of
    the model has packed. All engines of the node share the files; those that were used longest ago leave first. They
    lie in the folder `packed` of Manta's cache (`MANTA_CACHE`). None takes 32 GiB for models on demand and 0 for
    others; 0 keeps none. For CPUs whose engines share weights.
    """
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    """Token budget of one step, prefill and decode together."""
    max_num_sequences: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Sequences that run at a time."""
    typical_sequence_tokens: Count = 2048
    """Length of a sequence, in tokens, of which the KV cache of a model with recurrent states holds as many as it has
    states for. With shorter sequences more of the memory is for states, so that more sequences run at a time. No effect
    on other models.
    """
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether the engine does its own work while the device computes a step. The tokens stay the same. `auto` overlaps
    on devices that compute by themselves (GPUs); `on` does so on CPUs too.
    """
    logits_processors: dict[str, str | None] = {}
    """Logits processors that HTTP requests may use: a name and the `module:attribute` of its factory, or null for the
    factory that an installed package registers under this name.
    """

    adapters: dict[str, str] = {}
    """LoRA adapters that requests may name as their `model`: a name and the folder in which PEFT saved it
    (`adapter_config.json` and `adapter_model.safetensors`), or the GGUF file that llama.cpp's converter made of it. A
    hub id (`ID@REVISION` for a commit), and a URL whose fsspec package is installed, are read too. They are for models
    that Manta computes itself.
    """
    adapter_roots: tuple[str, ...] = ()
    """Folders below which operators may name adapters in `/v1/load_lora_adapter` while the server runs. A path whose
    links lead out of them is refused. If the list is empty, no adapter is loaded over HTTP.
    """
    max_adapter_bytes: Bytes = 2**30
    """Memory of all adapters together, for each rank. Adapters of `adapters` that take more are refused at start. Of
    those that are loaded over HTTP the least recently used ones leave the memory, and come back when a request names
    them.
    """

    def overlaps(self, is_asynchronous: bool) -> bool:
        """Returns whether a step is planned while another one is under way, on a device that does or does not compute
        by itself.
        """
        return is_asynchronous if self.overlap == "auto" else self.overlap == "on"

    @property
    def num_ranks(self) -> int:
        """Processes that share the model: one for each CPU or GPU rank, or for each TPU host."""
        if self.device == "tpu":
            return -(-self.tensor_parallel_size // self.tpu_chips_per_host)
        return self.tensor_parallel_size
