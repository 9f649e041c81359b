"""Makes the checkpoints that the benchmarks run: random weights in the exact shapes that the figures are known for.

Made at first use into the cache folder (`$MANTA_CACHE`, else the user's), by Hugging Face's own classes, so that any
engine loads them. Text from them is noise; speed does not depend on it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import shutil
import string
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from manta.workers.cache_folder import cache_entry

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "Qwen2",
        151_665,
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32_768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "Llama",
        128_000,
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "max_position_embeddings": 131_072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5-8-layers": (
        "Qwen3_5Text",
        32_000,
        {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 6144,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-8-layers": (
        "Qwen3",
        32_000,
        {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "intermediate_size": 6144,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": False,
        },
    ),
    "gemma-3-8-layers": (
        "Gemma3Text",
        32_000,
        {
            "vocab_size": 32_000,
            "hidden_size": 2560,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 10_240,
            "sliding_window": 1024,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-4b-12-layers": (
        "Qwen3",
        151_669,
        {
            "vocab_size": 151_936,
            "hidden_size": 2560,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b-4-layers": (
        "Qwen3Moe",
        32_000,
        {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b-4-layers": (
        "GptOss",
        32_000,
        {
            "vocab_size": 32_000,
            "hidden_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131_072,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "tie_word_embeddings": False,
        },
    ),
    "tiny-llama": (
        "Llama",
        32_000,
        {
            "vocab_size": 32_000,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 704,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": False,
        },
    ),
    "one-layer-llama": (
        "Llama",
        512,
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": False,
        },
    ),
}
"""Name to (family, tokenizer's vocabulary, configuration). The first has 494 M parameters, as Qwen2.5-0.5B. Those of 8
layers have the layers of Qwen3.5 and Gemma 3 with a small vocabulary, and layers of attention alone that are as large
as the former. Qwen3-4B is cut to a third of its layers. The mixtures have all experts of Qwen3-30B-A3B and gpt-oss-20b
in 4 layers, and a small vocabulary.
"""


def benchmark_checkpoint(name: str) -> pathlib.Path:
    """The folder of one of `SHAPES`, made if it does not exist yet (1 GB and under a minute for the half billion)."""
    return made_once(name, functools.partial(_make, name))


def cut_checkpoint(name: str, num_layers: int, max_positions: int) -> pathlib.Path:
    """The folder of one of `SHAPES` with its first layers alone, for contexts of up to `max_positions` tokens."""
    changes = {"num_hidden_layers": num_layers, "max_position_embeddings": max_positions}
    return made_once(f"{name}-{num_layers}-layers-{max_positions}", functools.partial(_make, name, changes=changes))


def made_once(name: str, make: Callable[[pathlib.Path], None], has: str = "config.json") -> pathlib.Path:
    """Returns a folder of the benchmarks' cache, which `make` fills if the file that it `has` does not exist yet."""
    folder = cache_entry("benchmarks") / name
    if not (folder / has).is_file():
        print(f"making the benchmark checkpoint {name} in {folder} (once) ...", file=sys.stderr, flush=True)
        partial = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            make(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.chmod(0o755)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def random_draft(folder: pathlib.Path) -> None:
    """Makes a draft model for tiny-llama, which is as large and has other weights, so that its drafts are chance."""
    import torch
    from safetensors.torch import load_file, save_file

    own = benchmark_checkpoint("tiny-llama")
    shutil.copytree(own, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(own / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def random_eagle3(folder: pathlib.Path) -> None:
    """Makes an EAGLE-3 head of SpecForge's form for tiny-llama, whose drafts are chance."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((benchmark_checkpoint("tiny-llama") / "config.json").read_text())
    hidden, inner, vocab_size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width, kv_width = hidden, hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "midlayer.self_attn.q_proj": (width, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, width),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocab_size, hidden),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file({name: each.bfloat16() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": vocab_size}
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (folder / "config.json").write_text(json.dumps(config))


def _make(name: str, folder: pathlib.Path, changes: Mapping[str, int] = {}) -> None:
    import torch
    import transformers

    family, num_tokens, shape = SHAPES[name]
    shape = {**shape, **changes}
    tokenizer = make_tokenizer(num_tokens)
    special = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**shape, **special, rms_norm_eps=1e-6, dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        elif torch.cuda.is_available():  # 8 G of them take minutes on a CPU
            parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.bfloat16, device="cuda") * 0.02)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(num_tokens: int) -> Any:
    """A byte-level BPE tokenizer whose vocabulary is filled with strings of letters: a shorter one plus a letter."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    longer = (itertools.product(string.ascii_lowercase, repeat=length) for length in range(2, 6))
    for letters in itertools.islice(itertools.chain.from_iterable(longer), num_tokens - len(pieces)):
        text = "".join(letters)
        pieces.append(text)
        merges.append((text[:-1], text[-1]))
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
