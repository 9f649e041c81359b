"""Serves a GGUF file as a checkpoint: writes a folder in the cache that stands for this version of the file.

The folder has `config.json` and the tokenizer in Hugging Face's format. In place of weights it has an index of the
tensors in the file. The keys: https://github.com/ggml-org/ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import struct
import tempfile
from typing import Any, NamedTuple

from manta.workers.checkpoints.gguf_header import GgufTensor, read_gguf_header
from manta.workers.checkpoints.gguf_keys import judge_unread
from manta.workers.checkpoints.gguf_values import check_values
from manta.workers.checkpoints.memory import GGUF_INDEX, GGUF_NO_TOKENIZER, gguf_cache
from manta.workers.checkpoints.stored_files import lfs_pointer
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig, RawValue

_FOLDER = re.compile(r".+-[0-9a-f]{16}|\.new-.{8}")
"""Form of the names of these folders, finished and not."""
_LAYOUT = 2
"""Version of the folder's contents. Folders of another version are not used."""
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files name this architecture too
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_INTERLEAVED = ("llama", "mistral")
"""Architectures whose query and key heads llama.cpp stores with their two halves interleaved."""
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FLOATS = ("F32", "F16", "BF16")
_ROUNDED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
_TYPES = (*_FLOATS, *_ROUNDED)
"""Types of tensors that are served. `formats/gguf_blocks.py` reads those that are rounded."""
_ROPE_DIVISORS = "rope_freqs.weight"
_MOST_DIVISOR_BYTES = 2**20
_IGNORED = (_ROPE_DIVISORS,)


def gguf_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder that stands for a GGUF file, and writes it if it does not exist.

    Raises `ModelError` if the file is damaged, or if its architecture or a tensor's type is not served.
    """
    path = path.resolve()
    stat = path.stat()
    identity = f"{_LAYOUT} {path} {stat.st_size} {stat.st_mtime_ns}"
    name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    folder = gguf_cache() / f"{path.stem}-{name}"
    if _is_whole(folder):
        return folder
    if (pointer := lfs_pointer(path.parent, path.name)) is not None:
        raise ModelError(pointer)
    try:
        new = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
        try:
            values, tensors = read_gguf_header(path)
            check_values(values, str(path))
            _write(GgufFile(path, RawConfig(values, str(path)), tensors), new)
            _forget_gone(folder.parent)
            _rename(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{path} needs a folder in {folder.parent}: {error.strerror}; set MANTA_CACHE") from error
    return folder


def _forget_gone(parent: pathlib.Path) -> None:
    """Removes the folders of files that no longer exist."""
    for index in parent.glob(f"*/{GGUF_INDEX}"):
        if not _FOLDER.fullmatch(index.parent.name):
            continue
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # another process removes it too
            if not pathlib.Path(json.loads(index.read_text())["file"]).exists():
                shutil.rmtree(index.parent, ignore_errors=True)


def _rename(new: pathlib.Path, folder: pathlib.Path) -> None:
    """Renames a folder, unless another process has done so. Removes a torn folder of this name first."""
    try:
        new.rename(folder)
    except OSError:
        if _is_whole(folder):
            return
        shutil.rmtree(folder)
        new.rename(folder)


def _is_whole(folder: pathlib.Path) -> bool:
    """Returns whether the folder has an index, which is written last, and all files that the index names."""
    try:
        files = json.loads((folder / GGUF_INDEX).read_text())["folder"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, torn, or of another version
        return False


class GgufFile(NamedTuple):
    """The header of a file."""

    path: pathlib.Path
    values: RawConfig
    """The metadata."""
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return self.values["general.architecture"].one_of(*_ARCHITECTURES)

    def of_model(self, key: str) -> RawValue:
        """Returns a value under the architecture's prefix."""
        return self.values[f"{self.architecture}.{key}"]


def _write(file: GgufFile, folder: pathlib.Path) -> None:
    config = gguf_config(file)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    no_tokenizer = _write_tokenizer(file, config["vocab_size"], folder)
    head_dim = config["head_dim"] if file.architecture in _INTERLEAVED else 0
    index = _index(file, head_dim) | {GGUF_NO_TOKENIZER: no_tokenizer}
    index["folder"] = {each.name: each.stat().st_size for each in folder.iterdir()}
    (folder / GGUF_INDEX).write_text(json.dumps(index))
    for each in folder.iterdir():
        with each.open("rb") as written:
            os.fsync(written.fileno())  # before the folder gets its name


def _check(file: GgufFile) -> None:
    num_files = file.values["split.count"].whole(1, least=0)
    if num_files > 1:
        raise ModelError(
            f"{file.path} is one of {num_files} files of a model; merge them (llama-gguf-split --merge) "
            "and give the result"
        )
    file.of_model("expert_count").whole(0, least=0, most=0)  # experts are not served yet
    for name, tensor in file.tensors.items():
        if tensor.kind not in _TYPES:
            raise ModelError(
                f"{file.path}: {name} is of type {tensor.kind}, which is not served; {', '.join(_TYPES)} are"
            )
    size = file.path.stat().st_size
    end = max((tensor.start + tensor.num_bytes for tensor in file.tensors.values()), default=0)
    if end > size:
        raise ModelError(
            f"{file.path} is truncated: it has {size} bytes and its header says {end}; copy or download it again"
        )


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the content of `config.json`, in Hugging Face's terms.

    Raises `ConfigError` naming a key whose value is not served, and `ModelError` for tensors that are not.
    """
    _check(file)
    config = _config(file)
    return config | {"unused_keys": judge_unread(file.values, file.architecture)}


def _config(file: GgufFile) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    hidden_size = file.of_model("embedding_length").whole()
    num_heads = file.of_model("attention.head_count").whole(most=hidden_size)
    head_dim = file.of_model("attention.key_length").whole(hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        file.of_model(key).whole(head_dim, least=head_dim, most=head_dim)
    if not (causal := file.of_model("attention.causal")).flag(True):
        raise causal.refused("left out or true")
    window = file.of_model("attention.sliding_window").whole(0, least=0)
    if window and file.architecture not in _INTERLEAVED:
        raise file.of_model("attention.sliding_window").refused(f"left out of a {file.architecture}")
    last_token = embedding.shape[0] - 1
    stops = [file.values[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    stop_ids = [each.whole(least=0, most=last_token) for each in stops if each.value is not None]
    return {
        "architectures": [_ARCHITECTURES[file.architecture] if not window else "MistralForCausalLM"],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.of_model("feed_forward_length").whole(),
        "num_hidden_layers": file.of_model("block_count").whole(),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.of_model("attention.head_count_kv").whole(),
        "head_dim": head_dim,
        "rms_norm_eps": file.of_model("attention.layer_norm_rms_epsilon").number(least=0, most=1),
        "max_position_embeddings": file.of_model("context_length").whole(),
        "rope_parameters": _rope(file),
        "sliding_window": window or None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": _dtype({tensor.kind for tensor in file.tensors.values()}),
        "eos_token_id": list(dict.fromkeys(stop_ids)),
        "quantization_config": {"quant_method": "gguf"},
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    """Returns the rope parameters. As in llama.cpp, a factor without a type scales linearly, and 0 means no factor."""
    theta = file.of_model("rope.freq_base").number(10000.0)
    kind, factor = file.of_model("rope.scaling.type"), file.of_model("rope.scaling.factor")
    if not factor.value:
        factor = file.of_model("rope.scale_linear")  # the older key
    is_scaled = kind.one_of("none", "linear", "yarn", default="linear") != "none" and factor.number(1.0, least=0) > 0
    has_divisors = _ROPE_DIVISORS in file.tensors
    if is_scaled and factor.number(1.0) != 1 and has_divisors:
        raise factor.refused(f"left out or 1 beside the tensor {_ROPE_DIVISORS}")
    scaling_keys = ("original_context_length", "yarn_beta_fast", "yarn_beta_slow")
    file.values.ignore(*(f"{file.architecture}.rope.scaling.{key}" for key in scaling_keys))
    if has_divisors:
        return {"rope_type": "default", "rope_theta": theta, "frequency_divisors": _floats(file, _ROPE_DIVISORS)}
    if not is_scaled or (kind.value is None and factor.number(1.0) == 1):
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {
        "rope_type": kind.text("linear"),
        "rope_theta": theta,
        "factor": factor.number(1.0),
        "original_max_position_embeddings": file.of_model("rope.scaling.original_context_length").value,
        "beta_fast": file.of_model("rope.scaling.yarn_beta_fast").value,
        "beta_slow": file.of_model("rope.scaling.yarn_beta_slow").value,
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _floats(file: GgufFile, name: str) -> list[float]:
    """Returns the values of a small float32 tensor."""
    kind, shape, start, num_bytes = file.tensors[name]
    if kind != "F32" or num_bytes > _MOST_DIVISOR_BYTES:
        raise ModelError(
            f"{file.path}: {name} is of type {kind} with {num_bytes} bytes; it must be F32 with at most "
            f"{_MOST_DIVISOR_BYTES}"
        )
    with file.path.open("rb") as opened:
        opened.seek(start)
        return list(struct.unpack(f"<{math.prod(shape)}f", opened.read(num_bytes)))


def _dtype(kinds: set[str]) -> str:
    """Returns the dtype to compute in. Norms are float32 in every file, so they do not decide it."""
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _index(file: GgufFile, interleaved_head_dim: int) -> dict[str, Any]:
    tensors = {}
    for name, (kind, shape, start, num_bytes) in file.tensors.items():
        if name in _IGNORED:
            continue
        is_rotated = name.rpartition(".")[0].endswith(("attn_q", "attn_k"))
        end, head_dim = start + num_bytes, interleaved_head_dim if is_rotated else 0
        tensors[_name(name)] = (kind, shape, start, end, head_dim)
    return {"file": str(file.path), "size": file.path.stat().st_size, "tensors": tensors}


def _name(name: str) -> str:
    """Returns Hugging Face's name of a tensor. An unknown tensor keeps its name, so that it is reported as unused."""
    base, _, suffix = name.rpartition(".")
    if base in _TENSORS:
        return f"{_TENSORS[base]}.{suffix}"
    kind, _, rest = base.partition(".")
    layer, _, part = rest.partition(".")
    if kind == "blk" and part in _LAYER_TENSORS:
        return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{suffix}"
    return name


def _write_tokenizer(file: GgufFile, num_rows: int, folder: pathlib.Path) -> str | None:
    """Writes the tokenizer. Returns why the file has none; then only the option `tokenizer` can name one."""
    from manta.workers.checkpoints.gguf_tokenizer import write_tokenizer

    try:
        write_tokenizer(file.path, file.values, num_rows, folder)
    except ModelError as error:
        return str(error)
    return None
