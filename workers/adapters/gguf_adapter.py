"""Reads an adapter in a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` makes it.

Metadata and names are those of https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`. Its scale is alpha
divided by the rank of each module, or 1 without an alpha, as llama.cpp computes it. What changes the experts of a layer
is one tensor for all of them. The file's author is not trusted.
"""

from __future__ import annotations

import math
import pathlib

import torch

from manta.workers.adapters.low_rank_adapter import Adapter, LowRankModule, digest_of, matrix_of, read_bounded
from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES, EXPERT, GgufArchitecture, name_of
from manta.workers.checkpoints.gguf_header import read_gguf_header
from manta.workers.checkpoints.stored_files import COPY_AGAIN
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig

SUFFIX = ".gguf"
_SERVED = tuple(name for name in ARCHITECTURES if name != "falcon-h1")
"""Architectures whose linears are those of transformers but for the order of a head's rows. The converter multiplies
those of Falcon-H1.
"""
_DELTA_NETS = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out")
_REORDERED = {
    "deepseek2": ("attn_k_b", "attn_v_b"),
    "qwen3next": _DELTA_NETS[:2],
    "qwen35": _DELTA_NETS,
    "qwen35moe": _DELTA_NETS,
}
"""Tensors that the converter makes of others, or whose rows or columns it sorts by sizes that adapters do not tell."""
_HALVES = {".lora_a": 0, ".lora_b": 1}
_MOST_ALPHA = 1e6
_INVOCATION = "adapter.alora.invocation_tokens"


def read_gguf_adapter(path: pathlib.Path, max_bytes: int) -> Adapter:
    """Reads an adapter's file of at most twice `max_bytes`. Raises `ModelError` naming the key or tensor that is
    missing, damaged or not supported.
    """
    data = read_bounded(path, max_bytes)
    header = read_gguf_header(path)
    metadata = RawConfig(header.values, str(path))
    metadata["general.type"].one_of("adapter")
    metadata["adapter.type"].one_of("lora")
    if _INVOCATION in header.values:
        raise ModelError(f"{path}: {_INVOCATION} makes an adapter that acts on a part of a prompt, which is not served")
    named = metadata["general.architecture"].one_of(*_SERVED)
    alpha = metadata["adapter.lora.alpha"].number(least=-_MOST_ALPHA, most=_MOST_ALPHA)
    halves: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in header.tensors.items():
        suffix = next((each for each in _HALVES if name.endswith(each)), None)
        if suffix is None:
            raise ModelError(
                f"{path}: tensor {name} is none of a plain LoRA adapter, whose tensors end in {' and '.join(_HALVES)}"
            )
        if name.removeprefix("blk.").partition(".")[2].partition(".")[0] in _REORDERED.get(named, ()):
            raise ModelError(f"{path}: {name} is in an order of llama.cpp's; give the folder that PEFT saved")
        end = tensor.start + tensor.num_bytes
        if end > len(data):
            raise ModelError(f"{path} is truncated, or changed while it was read; {COPY_AGAIN}")
        *outer, columns = tensor.shape
        content, rows = memoryview(data)[tensor.start : end], math.prod(outer)
        half = matrix_of(path, name, tensor.kind, (rows, columns), content).view(tensor.shape)
        halves.setdefault(name.removesuffix(suffix), {})[_HALVES[suffix]] = half
    return _assembled(path, ARCHITECTURES[named], alpha, halves)


def _assembled(
    path: pathlib.Path, architecture: GgufArchitecture, alpha: float, halves: dict[str, dict[int, torch.Tensor]]
) -> Adapter:
    """Joins the two halves of each module, under the modules' names in transformers."""
    modules: dict[str, LowRankModule] = {}
    for name, own in sorted(halves.items()):
        if len(own) < len(_HALVES):
            raise ModelError(f"{path}: {name} has one half only; {COPY_AGAIN}")
        a, b, module = own[0], own[1], name_of(architecture, name).removesuffix(".weight")
        of_experts = EXPERT in module
        if {a.dim(), b.dim()} != {3 if of_experts else 2} or (of_experts and len(a) != len(b)):
            raise ModelError(
                f"{path}: the halves of {name} have the shapes {list(a.shape)} and {list(b.shape)}; {COPY_AGAIN}"
            )
        rank = a.shape[-2]
        if rank != b.shape[-1]:
            raise ModelError(f"{path}: the halves of {name} have the ranks {rank} and {b.shape[-1]}; {COPY_AGAIN}")
        scale, is_rotated = alpha / rank if alpha else 1.0, name.endswith(("attn_q.weight", "attn_k.weight"))
        if of_experts:
            for expert in range(len(a)):
                modules[module.replace(EXPERT, str(expert))] = LowRankModule(a[expert], b[expert], scale)
        else:
            modules[module] = LowRankModule(a, b, scale, architecture.interleaves_heads and is_rotated)
    if not modules:
        raise ModelError(f"{path} holds no tensors; {COPY_AGAIN}")
    return Adapter(str(path), "", digest_of(modules), modules)
