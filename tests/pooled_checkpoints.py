"""Tiny random checkpoints of models that pool, as sentence-transformers and transformers save them."""

from __future__ import annotations

import functools
import pathlib
import shutil
import tempfile
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.embedding_models import SPECIAL, as_bert
from tests.checkpoints import CHAT_TEMPLATE, CORPUS

VOCAB_SIZE = 400
MAX_TOKENS = 120
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
    pools_prompts: bool = True
    """Whether the tokens of a prompt are pooled too."""
    has_marks: bool = True
    """Whether the tokenizer puts special tokens around a text."""


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
    "bert without prompts": Kind("BertConfig", _ENCODER, prompts={"query": "find it: "}, pools_prompts=False),
    "qwen3 without prompts": Kind(
        "Qwen3Config", _DECODER, prompts={"query": "Instruct: find it\nQuery:"}, pools_prompts=False, has_marks=False
    ),
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
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return as_bert(tokenizer, MAX_TOKENS)  # type: ignore[no-any-return]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pooled-")


def _saved(
    name: str, automatic: Any, config: Any, tokenizer: transformers.PreTrainedTokenizerFast | None = None
) -> pathlib.Path:
    """The folder of a random model with its tokenizer, by default `pooling_tokenizer`."""
    folder = pathlib.Path(_folder().name) / name
    torch.manual_seed(len(name))
    automatic.from_config(config).save_pretrained(folder)
    (tokenizer or pooling_tokenizer()).save_pretrained(folder)
    return folder


@functools.cache
def embedder(name: str) -> pathlib.Path:
    """The folder of a kind of `EMBEDDERS`, as sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    kind = EMBEDDERS[name]
    config = getattr(transformers, kind.config)(**kind.fields)
    bare = _saved(f"{name}-bare", transformers.AutoModel, config, None if kind.has_marks else answering_tokenizer(None))
    torch.manual_seed(1)
    pooling = Pooling(config.hidden_size, kind.modes, include_prompt=kind.pools_prompts)  # type: ignore[arg-type]
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


# ---- models that read messages ---------------------------------------------------------------------------------------

_CAUSAL = {**_DECODER, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 2}
MAX_PROMPT_TOKENS = 600
INSTRUCTION = "Find the text that answers the question"
"""Prompt of the checkpoints below."""
_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def pair_template(has_parts: bool = False) -> str:
    """A chat template that writes the messages of a pair, as rerankers have it."""
    content = "content[0].text" if has_parts else "content"
    written = {
        role: f"{{% for each in messages if each.role == '{role}' %}}{{{{ each.{content} }}}}{{% endfor %}}"
        for role in ("system", "query", "document")
    }
    return (
        f"<|im_start|>user\nTask: {written['system']} Query: {written['query']} Document: {written['document']}"
        "<|im_end|>\n<|im_start|>assistant\n{% if add_generation_prompt %}<think></think>{% endif %}"
    )


def answering_tokenizer(template: str | None) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tokens `yes` and `no`, perhaps with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=_MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *["yes", "no"] * 50], trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_PROMPT_TOKENS,
    )
    fast.chat_template = template
    return fast


def _saved_decoder(
    name: str, automatic: Any, template: str, config_class: str = "Qwen3Config", **fields: Any
) -> pathlib.Path:
    config = getattr(transformers, config_class)(**{**_CAUSAL, **fields})
    return _saved(name, automatic, config, answering_tokenizer(template))


class Scoring(NamedTuple):
    """A cross-encoder of sentence-transformers that reads messages."""

    has_false_token: bool = True
    has_head: bool = False
    """Whether it has a head for one label instead of scoring by its answer."""
    has_parts: bool = False
    variables: dict[str, bool] = {}
    has_padding: bool = True
    tied: bool = False


SCORERS = {
    "two_tokens": Scoring(),
    "one_token": Scoring(has_false_token=False, variables={"add_generation_prompt": True}),
    "parts": Scoring(has_parts=True, tied=True),
    "no_padding": Scoring(has_padding=False),
    "head": Scoring(has_head=True),
}


@functools.cache
def scorer(name: str) -> pathlib.Path:
    """The folder of a kind of `SCORERS`, as sentence-transformers saves it."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    kind = SCORERS[name]
    automatic = transformers.AutoModelForSequenceClassification if kind.has_head else transformers.AutoModelForCausalLM
    fields: dict[str, Any] = {"tie_word_embeddings": kind.tied, **({"num_labels": 1} if kind.has_head else {})}
    if not kind.has_padding:
        fields["pad_token_id"] = None
    bare = _saved_decoder(f"{name}-bare", automatic, pair_template(kind.has_parts), **fields)
    task: Any = "sequence-classification" if kind.has_head else "text-generation"
    processing: Any = {"chat_template": kind.variables} if kind.variables else None
    parts: list[Any] = [Transformer(str(bare), transformer_task=task, processing_kwargs=processing)]
    if not kind.has_head:
        ids = parts[0].tokenizer.convert_tokens_to_ids(["yes", "no"])
        parts.append(LogitScore(ids[0], ids[1] if kind.has_false_token else None))
    folder = pathlib.Path(_folder().name) / name
    activation = None if kind.has_false_token else torch.nn.Identity()
    model = CrossEncoder(modules=parts, device="cpu", activation_fn=activation, prompts={"task": INSTRUCTION})
    model.default_prompt_name = "task"
    model.save(str(folder))
    return folder


@functools.cache
def generator(pipeline_tag: str = "", config_class: str = "Qwen3Config") -> pathlib.Path:
    """The folder of a model that generates. With a `pipeline_tag` it has a page that names it, as the first
    Qwen3-Reranker has.
    """
    name = f"{config_class}-{pipeline_tag}"
    folder = _saved_decoder(name, transformers.AutoModelForCausalLM, CHAT_TEMPLATE, config_class)
    if pipeline_tag:
        metadata = f"license: apache-2.0\nbase_model:\n- Qwen/Qwen3-0.6B-Base\npipeline_tag: {pipeline_tag}"
        (folder / "README.md").write_text(f"---\n{metadata}\n---\n# A model\n")
    return folder


@functools.cache
def conversing_embedder() -> pathlib.Path:
    """The folder of a model of sentence-transformers that reads each text as a message of a user."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    bare = _saved_decoder("conversing-bare", transformers.AutoModel, CHAT_TEMPLATE)
    parts: list[Any] = [Transformer(str(bare)), Pooling(_CAUSAL["hidden_size"], "lasttoken", include_prompt=False)]
    folder = pathlib.Path(_folder().name) / "conversing"
    SentenceTransformer(modules=parts, prompts={"task": INSTRUCTION}, device="cpu").save(str(folder))
    return folder


def with_change(folder: pathlib.Path, copy: pathlib.Path, file: str, before: str, after: str) -> pathlib.Path:
    """Returns a copy of a checkpoint in which a text of one file is another one."""
    shutil.copytree(folder, copy)
    text = (copy / file).read_text()
    assert before in text
    (copy / file).write_text(text.replace(before, after))
    return copy
