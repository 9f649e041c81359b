"""Makes the encoders of `manta bench embeddings`: random weights in published shapes, for Manta, sentence-transformers
and llama.cpp alike. A text of n words has n + 2 tokens for all of them.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.checkpoints import made_once

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_CLASS, _SEPARATOR = 2, 3
MAX_TOKENS = 512
GGUF_FILE = "model.gguf"


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    intermediate: int
    mode: str
    vocabulary: int = 30_522


SHAPES = {
    "minilm": Shape(384, 6, 12, 1536, "mean"),
    "bge-base": Shape(768, 12, 12, 3072, "cls"),
    "tiny": Shape(64, 2, 4, 128, "mean", 1000),
}
"""all-MiniLM-L6-v2, bge-base-en-v1.5, and one to try the benchmark."""


def embedding_checkpoint(name: str) -> pathlib.Path:
    """Returns the folder of one of `SHAPES`, as sentence-transformers saves it, with llama.cpp's file `GGUF_FILE`."""
    return made_once(f"embeddings-{name}", functools.partial(_make, SHAPES[name]))


def random_texts(name: str, lengths: list[int], seed: int = 0) -> list[str]:
    """Returns texts with so many tokens each, special ones included."""
    draw = random.Random(seed)
    num_words = SHAPES[name].vocabulary - len(SPECIAL)
    return [" ".join(f"w{draw.randrange(num_words)}" for _ in range(length - 2)) for length in lengths]


def _make(shape: Shape, folder: pathlib.Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    bare = folder / "bare"
    config = transformers.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=MAX_TOKENS,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(bare)
    _tokenizer(shape).save_pretrained(bare)
    mode: Any = shape.mode
    parts: list[Any] = [Transformer(str(bare)), Pooling(shape.hidden, mode), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    _write_gguf(folder, shape, folder / GGUF_FILE)


def _words(shape: Shape) -> list[str]:
    return [f"w{number}" for number in range(shape.vocabulary - len(SPECIAL))]


def _tokenizer(shape: Shape) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *_words(shape)])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return as_bert(tokenizer, MAX_TOKENS)


def as_bert(tokenizer: Any, max_tokens: int) -> Any:
    """Returns a `tokenizers.Tokenizer`, whose first tokens are `SPECIAL`, as transformers' fast tokenizer that joins
    pairs as BERT's does.
    """
    import transformers
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", _CLASS), ("[SEP]", _SEPARATOR)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_tokens,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _write_gguf(folder: pathlib.Path, shape: Shape, path: pathlib.Path) -> None:
    """Writes the weights in float32, as llama.cpp's own converter names them."""
    import gguf
    import safetensors.numpy

    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(MAX_TOKENS)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_eps(json.loads((folder / "config.json").read_text())["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS if shape.mode == "cls" else gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*SPECIAL, *(f"\u2581{word}" for word in _words(shape))])  # words begin so in llama.cpp
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(_words(shape)))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(_CLASS)
    writer.add_sep_token_id(_SEPARATOR)
    writer.add_eos_token_id(_SEPARATOR)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_mask_token_id(4)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, shape.layers)
    for name, tensor in safetensors.numpy.load_file(folder / "model.safetensors").items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is not None:
            writer.add_tensor(found, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
