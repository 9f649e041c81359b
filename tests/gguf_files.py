"""Writes a tiny checkpoint as a GGUF file, with the package `gguf`: each tensor in a type that the test chooses.

Types that the package cannot quantise to are filled with random blocks of about the size of the weights: these are
random too. What a file stands for is read back by transformers or by `gguf.dequantize`.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np
import safetensors.torch
import torch

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Vocabulary(NamedTuple):
    """A vocabulary to write instead of the checkpoint's: SentencePiece's with scores, byte-level with merges."""

    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None


KindOf = Callable[[str], str]
"""GGUF's name of a weight, such as `blk.0.attn_q.weight`, to ggml's name of the type to store it in."""


Quantise = Callable[[np.ndarray, str], np.ndarray]
"""A weight and ggml's name of a type to the weight's blocks, uint8 [..., bytes of a row]."""


def write_gguf(
    folder: pathlib.Path,
    path: pathlib.Path,
    kind_of: KindOf,
    *,
    rope_divisors: np.ndarray | None = None,
    vocabulary: Vocabulary | None = None,
    **metadata: object,
) -> pathlib.Path:
    """Writes the checkpoint of `folder` to `path`; vectors are F32, as in every published file.

    `metadata` is added to the checkpoint's or replaces it; two underscores stand for a dot, and None leaves a key out.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    _add_sizes(writer, config)
    if vocabulary is None:
        add_tokenizer(writer, folder)
    else:
        _add_vocabulary(writer, vocabulary)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        writer.kv_data[0].pop(name, None)
        if value is not None:
            writer.add_key_value(name, value, _value_type(value))
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in sorted((name, tensor.float().numpy()) for name, tensor in tensors.items()):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if architecture == "llama" and ".self_attn.q_proj." in name:
            tensor = interleaved(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".self_attn.k_proj." in name:
            tensor = interleaved(tensor, config["num_key_value_heads"])
        add_tensor(writer, gguf_name(name), tensor, kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    base, _, suffix = name.rpartition(".")
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if base in whole:
        return f"{whole[base]}.{suffix}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """The two halves of each head interleaved, as llama.cpp's converter does."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    loaded = json.loads((folder / "tokenizer.json").read_text())
    ids = loaded["model"]["vocab"] | {token["content"]: token["id"] for token in loaded["added_tokens"]}
    special = {token["content"] for token in loaded["added_tokens"] if token["special"]}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    types = [3 if token in special else 1 for token in tokens]
    # llama.cpp wants a token for each row of the embedding, so its converter fills up with unused ones
    padding = range(len(tokens), json.loads((folder / "config.json").read_text())["vocab_size"])
    writer.add_token_list([*tokens, *(f"[PAD{number}]" for number in padding)])
    writer.add_token_types([*types, *(5 for _ in padding)])
    writer.add_token_merges([" ".join(merge) for merge in loaded["model"]["merges"]])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for role, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if config.get(role) is not None:
            add(ids[config[role]])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text())


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(vocabulary.scores)
        writer.add_unk_token_id(vocabulary.tokens.index("<unk>"))
    for name, add in (("<s>", writer.add_bos_token_id), ("</s>", writer.add_eos_token_id)):
        if name in vocabulary.tokens:
            add(vocabulary.tokens.index(name))


def _value_type(value: object) -> gguf.GGUFValueType:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
        list: gguf.GGUFValueType.ARRAY,
    }
    return kinds[type(value)]


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: np.ndarray,
    kind_of: KindOf,
    *,
    is_dense: bool = False,
    quantise: Quantise | None = None,
) -> None:
    """Writes a tensor in the type that `kind_of` chooses; if `is_dense`, the numbers that its blocks stand for. Blocks
    are those of `quantise`, or of the package and else random.
    """
    kind = "F32" if tensor.ndim == 1 else kind_of(name)
    kind_number: gguf.GGMLQuantizationType = getattr(gguf.GGMLQuantizationType, kind)
    if quantise is not None and kind != "F32":
        data = quantise(tensor, kind)
    elif kind in RANDOM_BLOCKS:
        *outer, inputs = tensor.shape
        rows = RANDOM_BLOCKS[kind](math.prod(outer), inputs, np.random.default_rng(sum(name.encode())))
        data = rows.reshape(*outer, -1)
    else:
        data = gguf.quantize(tensor.astype(np.float32), kind_number)
    if is_dense:
        data, kind_number = gguf.dequantize(data, kind_number), gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, data, raw_dtype=kind_number)


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)[..., None].view(np.uint8)


def _random_bytes(num_bytes: int, first: int, size: float) -> Callable[[int, int, np.random.Generator], np.ndarray]:
    """Blocks of 256 inputs of random bytes, with their factor, a float16 at byte `first`; `size` is the usual number
    that the factor multiplies.
    """

    def random_blocks(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
        blocks = random.integers(0, 256, (rows, inputs // 256, num_bytes), dtype=np.uint8)
        blocks[..., first : first + 2] = _halves((0.5 + random.random(blocks.shape[:2])) / (size * inputs**0.5))
        return blocks.reshape(rows, -1)

    return random_blocks


def _random_q2_k(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    """`d * scale * number - dmin * minimum` with random 4-bit scales and minima, and a mean of 0."""
    blocks = (rows, inputs // 256)
    d = (0.5 + random.random(blocks)) / (12 * inputs**0.5)
    packed = random.integers(0, 256, (*blocks, 80), dtype=np.uint8)
    return np.concatenate((packed, _halves(d), _halves(1.5 * d)), axis=-1).reshape(rows, -1)


def _random_iq4_nl(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    d = (0.5 + random.random((rows, inputs // 32))) / (60 * inputs**0.5)
    packed = random.integers(0, 256, (rows, inputs // 32, 16), dtype=np.uint8)
    return np.concatenate((_halves(d), packed), axis=-1).reshape(rows, -1)


def _random_mxfp4(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    exponents = random.integers(119, 123, (rows, inputs // 32, 1), dtype=np.uint8)
    packed = random.integers(0, 256, (rows, inputs // 32, 16), dtype=np.uint8)
    return np.concatenate((exponents, packed), axis=-1).reshape(rows, -1)


def _random_iq1_m(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    """The factor of a block is in the highest bits of the four words at its end."""
    blocks = random.integers(0, 256, (rows, inputs // 256, 56), dtype=np.uint8)
    factors = _halves((0.5 + random.random(blocks.shape[:2])) / (6 * inputs**0.5)).view(np.uint16)
    words = blocks[..., 48:].copy().view(np.uint16) & 0x0FFF
    words |= (factors >> np.array([0, 4, 8, 12], dtype=np.uint16)) << 12
    blocks[..., 48:] = words.view(np.uint8)
    return blocks.reshape(rows, -1)


def _random_tq2_0(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    """Two bits of a byte could hold four numbers, of which TQ2_0 stores three."""
    digits = random.integers(0, 3, (rows, inputs // 256, 64, 4), dtype=np.uint8)
    packed = (digits << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(-1, dtype=np.uint8)
    d = (0.5 + random.random(packed.shape[:2])) / (0.8 * inputs**0.5)
    return np.concatenate((packed, _halves(d)), axis=-1).reshape(rows, -1)


def _random_nvfp4(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    """Four unsigned E4M3 scales of 16 numbers each, of about the size of 1 / (3 * inputs ** 0.5)."""
    blocks = (rows, inputs // 64)
    exponent = max(1, round(7 - math.log2(3 * inputs**0.5)))
    scales = (exponent << 3) + random.integers(0, 8, (*blocks, 4), dtype=np.uint8)
    packed = random.integers(0, 256, (*blocks, 32), dtype=np.uint8)
    return np.concatenate((scales.astype(np.uint8), packed), axis=-1).reshape(rows, -1)


def _random_q8_1(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 120, (rows, inputs // 32 * 40), dtype=np.uint8)


def _random_q4_k(rows: int, inputs: int, random: np.random.Generator, fifth_bytes: int = 0) -> np.ndarray:
    """`d * scale * number - dmin * minimum` with random 6-bit scales and minima, and a mean of 0."""
    blocks = (rows, inputs // 256)
    middle, spread = (15.5, 400) if fifth_bytes else (7.5, 190)
    d = (0.5 + random.random(blocks)) / (spread * inputs**0.5)
    packed = random.integers(0, 256, (*blocks, 12 + fifth_bytes + 128), dtype=np.uint8)
    return np.concatenate((_halves(d), _halves(middle * d), packed), axis=-1).reshape(rows, -1)


def _random_q5_k(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    return _random_q4_k(rows, inputs, random, fifth_bytes=32)


def _random_q6_k(rows: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    blocks = (rows, inputs // 256)
    d = (0.5 + random.random(blocks)) / (1300 * inputs**0.5)
    packed = random.integers(0, 256, (*blocks, 128 + 64 + 16), dtype=np.uint8)
    return np.concatenate((packed, _halves(d)), axis=-1).reshape(rows, -1)


RANDOM_BLOCKS = {
    "Q2_K": _random_q2_k,
    "Q3_K": _random_bytes(110, first=108, size=40),
    "Q4_K": _random_q4_k,
    "Q5_K": _random_q5_k,
    "Q6_K": _random_q6_k,
    "IQ4_NL": _random_iq4_nl,
    "IQ4_XS": _random_bytes(136, first=0, size=1000),
    "MXFP4": _random_mxfp4,
    "IQ1_S": _random_bytes(50, first=0, size=6),
    "IQ1_M": _random_iq1_m,
    "IQ2_XXS": _random_bytes(66, first=0, size=50),
    "IQ2_XS": _random_bytes(74, first=0, size=50),
    "IQ2_S": _random_bytes(82, first=0, size=50),
    "IQ3_XXS": _random_bytes(98, first=0, size=120),
    "IQ3_S": _random_bytes(110, first=0, size=130),
    "TQ1_0": _random_bytes(54, first=52, size=0.8),
    "TQ2_0": _random_tq2_0,
    "NVFP4": _random_nvfp4,
    "Q8_1": _random_q8_1,  # of activations, in no file
}


def dequantized(path: pathlib.Path, original: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the checkpoint that a file stands for, as the package `gguf` dequantises it, beside the `original`'s
    configuration.
    """
    shutil.copytree(original, folder)
    config = json.loads((original / "config.json").read_text())
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = {}
    for name in safetensors.torch.load_file(original / "model.safetensors"):
        tensor = stored[gguf_name(name)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ARCHITECTURES[config["architectures"][0]] == "llama":
            if ".self_attn.q_proj." in name:
                values = _in_halves(values, config["num_attention_heads"])
            elif ".self_attn.k_proj." in name:
                values = _in_halves(values, config["num_key_value_heads"])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _in_halves(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes `interleaved`."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
