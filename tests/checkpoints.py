"""Tiny random checkpoints in Hugging Face format, a small tokenizer, and what transformers itself answers for them.

Used by every test that needs a model. `checkpoint()` makes each variant once a process, in a temporary folder that is
removed at exit; nothing is downloaded. Text from these models is noise: for text that makes sense use the demo model.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
VOCAB_SIZE = 320
"""256 bytes, the special tokens and the first merges of the corpus; the default of model and tokenizer alike."""

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "The manta ray is a large fish that lives in warm oceans and feeds on plankton.",
    "A scheduler decides which requests run in the next step, and which of them have to wait for memory.",
    "Please answer the following question in one short sentence: where does the river end?",
    "The quick brown fox jumps over the lazy dog while the other dogs are sleeping in the sun.",
    "In the beginning there was a tokenizer, and the tokenizer split every word into smaller pieces.",
    "user assistant system hello thank you very much, I would like to order three cups of coffee and some tea.",
    "Größe, naïve, 東京, 🙂: text is not only ASCII, and neither are the bytes that stand for it.",
    '{"name": "Ada", "city": "London", "items": [1, 2, 3], "total": 42.50}',
]

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_windows": (
        "Qwen3Config",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "max_window_layers": 0,
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24}),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    "lfm2_convolutions": ("Lfm2Config", {"layer_types": ["conv"] * 3, "block_auto_adjust_ff_dim": False}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {"num_key_value_heads": None}),
    "opt": ("OPTConfig", {"num_key_value_heads": None, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gptj": ("GPTJConfig", {"num_key_value_heads": None, "rotary_dim": 8}),
    "stablelm": ("StableLmConfig", {"use_parallel_residual": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"num_key_value_heads": None}),
    "starcoder2": ("Starcoder2Config", {}),
    "biogpt": ("BioGptConfig", {"num_key_value_heads": None}),
    "falcon": ("FalconConfig", {"num_key_value_heads": None, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("BloomConfig", {"num_key_value_heads": None, "n_layer": 3, "n_head": 4}),
    "mpt": ("MptConfig", {"num_key_value_heads": None, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 512}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"num_key_value_heads": None, "window_size": 24, "attention_types": [[["global", "local", "local"], 1]]},
    ),
    "persimmon": ("PersimmonConfig", {"num_key_value_heads": None}),
    "xglm": ("XGLMConfig", {"num_key_value_heads": None, "ffn_dim": 96}),
}
"""Name to (transformers configuration class, what differs from the common sizes). The first nine run natively."""

NATIVE_FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")


def make_tokenizer(folder: pathlib.Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Trains a byte-level BPE tokenizer with a chat template and saves it so that `AutoTokenizer` loads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_checkpoint(
    family: str,
    folder: str | pathlib.Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> pathlib.Path:
    """Writes `config.json`, safetensors and a tokenizer of one of `FAMILIES` into `folder`, and returns it.

    `overrides` replace configuration fields (`tie_word_embeddings=True`, `num_hidden_layers=1`); a small
    `max_shard_size` such as "50KB" makes a sharded checkpoint. A `vocab_size` that the tokenizer cannot fill leaves a
    padded tail, as many published models have.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    class_name, differences = FAMILIES[family]
    options = {**_SIZES, "bos_token_id": 0, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}
    options |= {"tie_word_embeddings": False} | differences | overrides
    config = getattr(transformers, class_name)(vocab_size=vocab_size, **options)
    config.dtype = dtype
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    randomise(model, seed)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(folder, vocab_size)
    return folder


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights with which every part matters, biases and norms too, and greedy outputs that vary.

    Small embeddings keep a tied head from echoing its input; sharp attention and a strong last norm set logits apart.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() == 1:
            value = 0.2 * noise if name.endswith("bias") else 1 + 0.2 * noise
            if name == "model.norm.weight":
                value *= 4
            if name.endswith("recurrent_param"):  # channels keep what they have for some tokens
                value -= 5
        elif any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
            value = 0.1 * noise
        else:
            value = noise / parameter.shape[-1] ** 0.5
            if any(part in name for part in ("q_proj", "k_proj")):
                value *= 1.5
        parameter.data.copy_(value)


def set_buffers(model: torch.nn.Module) -> None:
    """Gives stored buffers numbers with which they matter."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("balancing_biases"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
        if name.endswith("tid2eid"):
            num_experts: Any = model.config.n_routed_experts
            chosen = [torch.randperm(num_experts, generator=generator)[: buffer.shape[1]] for _ in buffer]
            buffer.copy_(torch.stack(chosen))


_folders: dict[tuple, pathlib.Path] = {}
_root: tempfile.TemporaryDirectory | None = None


def checkpoint(family: str, **options: Any) -> pathlib.Path:
    """The folder of `make_checkpoint(family, ..., **options)`, made once a process. Do not write to it."""
    global _root
    key = (family, repr(sorted(options.items())))
    if key not in _folders:
        if _root is None:
            _root = tempfile.TemporaryDirectory(prefix="manta-checkpoints-")
        folder = pathlib.Path(_root.name) / f"{family}-{len(_folders)}"
        _folders[key] = make_checkpoint(family, folder, **options)
    return _folders[key]


@functools.lru_cache(maxsize=8)
def reference_model(folder: pathlib.Path) -> Any:
    """The transformers model of `folder` in float32, with the eager attention; Falcon's, which would add its ALiBi
    twice, with the one that transformers chooses.
    """
    is_falcon = transformers.AutoConfig.from_pretrained(folder).model_type == "falcon"
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=None if is_falcon else "eager"
    ).eval()


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """torch computes on one thread: for tiny models several gain nothing, and wait for each other on a busy machine."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@torch.inference_mode()
def reference_logits(folder: pathlib.Path, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes for one sequence in float32, [num_tokens, vocab_size]."""
    return _logits(folder, tuple(token_ids)).clone()


@functools.cache
def _logits(folder: pathlib.Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    with on_one_thread():
        return reference_model(folder)(torch.tensor([token_ids]), use_cache=False).logits[0]


def reference_greedy(folder: pathlib.Path, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation in float32, past end-of-sequence tokens: exactly `num_tokens` ids."""
    return list(_generated(folder, tuple(prompt), num_tokens))


@functools.cache
@torch.inference_mode()
def _generated(folder: pathlib.Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    with on_one_thread():
        output = reference_model(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=0,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())
