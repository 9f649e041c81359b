"""Tiny random checkpoints of models that pool, as sentence-transformers and transformers save them."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints import CORPUS

VOCAB_SIZE = 400
MAX_TOKENS = 120
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 2, "eos_token_id": 3}


class Kind(NamedTuple):
    """A configuration of transformers, and the modules behind it."""

    config: str
    fields: dict[str, Any]
    modes: str | tuple[str, ...] = "mean"
    dense: int = 0
    """Numbers of a dense layer's output; 0 for no such layer."""
    normalises: bool = True
    prompts: dict[str, str] = {}


EMBEDDERS = {
    "bert_mean": Kind("BertConfig", _ENCODER),
    "bert_cls": Kind("BertConfig", _ENCODER, "cls"),
    "roberta": Kind("RobertaConfig", _ENCODER, normalises=False),
    "xlm_roberta": Kind("XLMRobertaConfig", _ENCODER, prompts={"query": "query: ", "passage": "passage: "}),
    "modernbert": Kind("ModernBertConfig", {**_ENCODER, "local_attention": 16, "global_attn_every_n_layers": 2}),
    "deberta": Kind("DebertaV2Config", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": Kind(
        "DistilBertConfig",
        {"vocab_size": VOCAB_SIZE, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
        dense=20,
    ),
    "mpnet": Kind("MPNetConfig", _ENCODER),
    "electra": Kind(
        "ElectraConfig", {**_ENCODER, "embedding_size": 24}, ("max", "mean_sqrt_len_tokens"), normalises=False
    ),
    "qwen3": Kind("Qwen3Config", _DECODER, "lasttoken", prompts={"query": "Instruct: find it\nQuery:", "document": ""}),
    "llama": Kind("LlamaConfig", _DECODER, "weightedmean"),
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert_ce": ("BertConfig", {**_ENCODER, "num_labels": 1}),
    "roberta_ce": ("RobertaConfig", {**_ENCODER, "num_labels": 1}),
    "xlm_roberta_ce": ("XLMRobertaConfig", {**_ENCODER, "num_labels": 3}),
    "modernbert_ce": ("ModernBertConfig", {**_ENCODER, "num_labels": 1, "classifier_pooling": "mean"}),
    "deberta_ce": ("DebertaV2Config", {**_ENCODER, "num_labels": 2, "relative_attention": True}),
    "qwen3_ce": ("Qwen3Config", {**_DECODER, "num_labels": 1}),
}
"""Configurations of models with a head for labels; one label makes a cross-encoder."""

TEXTS = [*CORPUS, "a", "of", " ".join(CORPUS)[:260]]


def pooling_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A WordPiece tokenizer that joins pairs as BERT's does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pooled-")


def _saved(name: str, automatic: Any, config: Any) -> pathlib.Path:
    """The folder of a random model with its tokenizer."""
    folder = pathlib.Path(_folder().name) / name
    torch.manual_seed(len(name))
    automatic.from_config(config).save_pretrained(folder)
    pooling_tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def embedder(name: str) -> pathlib.Path:
    """The folder of a kind of `EMBEDDERS`, as sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    kind = EMBEDDERS[name]
    config = getattr(transformers, kind.config)(**kind.fields)
    bare = _saved(f"{name}-bare", transformers.AutoModel, config)
    torch.manual_seed(1)
    pooling = Pooling(config.hidden_size, kind.modes)  # type: ignore[arg-type]
    parts: list[Any] = [Transformer(str(bare)), pooling]
    if kind.dense:
        parts.append(Dense(pooling.pooling_output_dimension, kind.dense))
    if kind.normalises:
        parts.append(Normalize())
    folder = pathlib.Path(_folder().name) / name
    SentenceTransformer(modules=parts, prompts=kind.prompts or None, device="cpu").save(str(folder))
    return folder


@functools.cache
def classifier(name: str) -> pathlib.Path:
    """The folder of a model of `CLASSIFIERS`, as transformers saves it."""
    config_class, fields = CLASSIFIERS[name]
    config = getattr(transformers, config_class)(**fields)
    return _saved(name, transformers.AutoModelForSequenceClassification, config)
