"""Vectors and scores of `LLM` beside sentence-transformers and transformers, for models of many kinds."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from manta import LLM
from manta.cluster.errors import RequestRefused
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.models.model_config import ModelError
from manta.workers.sampling_params import SamplingParams
from tests.pooled_checkpoints import CLASSIFIERS, EMBEDDERS, TEXTS, classifier, embedder, with_change


def loaded(folder: pathlib.Path) -> LLM:
    return LLM(str(folder), num_threads=1, dtype="float32")


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(name: str) -> None:
    llm, theirs = loaded(embedder(name)), SentenceTransformer(str(embedder(name)), device="cpu")
    found, expected = llm.embed(TEXTS), theirs.encode(TEXTS)
    assert cosines(found, expected).min() > 0.9999
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    for prompt in EMBEDDERS[name].prompts:
        expected = theirs.encode(TEXTS, prompt_name=prompt)
        assert cosines(llm.embed(TEXTS, prompt_name=prompt), expected).min() > 0.9999
    np.testing.assert_allclose(llm.embed(TEXTS[2]), found[2:3], rtol=0, atol=1e-5 * np.abs(found).max())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_transformers(name: str) -> None:
    folder = classifier(name)
    llm = loaded(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    pairs = [(TEXTS[0], text) for text in TEXTS[:8]]
    with torch.inference_mode():
        logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs])
    if model.config.num_labels == 1:
        expected = logits.sigmoid()[:, 0].numpy()
        np.testing.assert_allclose(llm.score(TEXTS[0], [text for _, text in pairs]), expected, atol=1e-4)
    with torch.inference_mode():
        single = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS[:8]])
    probabilities = single.sigmoid() if model.config.num_labels == 1 else single.softmax(-1)
    np.testing.assert_allclose(llm.classify(TEXTS[:8]), probabilities.numpy(), atol=1e-4)


def test_a_ranking_of_200_texts_is_that_of_sentence_transformers() -> None:
    words = sorted({word for text in TEXTS for word in text.split()})
    texts = [" ".join(words[(7 * index + 3 * place) % len(words)] for place in range(9)) for index in range(200)]
    llm, theirs = loaded(embedder("bert_mean")), SentenceTransformer(str(embedder("bert_mean")), device="cpu")
    for query in TEXTS[:3]:
        found = llm.embed(texts) @ llm.embed(query)[0]
        expected = theirs.similarity(theirs.encode(query), theirs.encode(texts))[0].numpy()
        gaps = -np.diff(-np.sort(-expected))
        order, wanted = np.argsort(-found), np.argsort(-expected)
        swapped = np.flatnonzero(order != wanted)
        assert all(gaps[max(0, place - 1) : place + 1].min() < 1e-6 for place in swapped), "only ties may change places"


@pytest.mark.parametrize("name", ["bert_mean", "deberta", "qwen3"])
def test_an_exact_vector_has_the_same_bits_in_any_batch(name: str) -> None:
    llm = LLM(str(embedder(name)), num_threads=2, dtype="float32", exact=True)
    alone = np.concatenate([llm.embed(text) for text in TEXTS])
    np.testing.assert_array_equal(llm.embed(TEXTS), alone)
    np.testing.assert_array_equal(llm.embed(TEXTS[::-1])[::-1], alone)
    many = llm.embed([*TEXTS[5:], *TEXTS * 3])
    np.testing.assert_array_equal(many[-len(TEXTS) :], alone)


def test_a_text_that_is_too_long_is_refused_or_cut() -> None:
    llm = loaded(embedder("qwen3"))
    long = "the manta ray " * 200
    with pytest.raises(RequestRefused) as caught:
        llm.embed(["short", long])
    assert (caught.value.refusal.kind, caught.value.refusal.field) == ("context_length", "texts[1]")
    expected = SentenceTransformer(str(embedder("qwen3")), device="cpu").encode([long])
    assert cosines(llm.embed(long, truncate=True), expected).min() > 0.9999


@pytest.mark.parametrize(
    ("texts", "prompt_name", "field"),
    [(["a", "b\ud800", "c"], None, "texts[1]"), ([[5, 6], "a", "\ud800"], "query", "texts[2]")],
)
def test_a_text_that_is_no_unicode_is_named(texts: list[str | list[int]], prompt_name: str | None, field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        loaded(embedder("qwen3")).embed(texts, prompt_name=prompt_name)
    assert (caught.value.refusal.kind, caught.value.refusal.field) == ("unfit", field)


def test_dimensions_keep_the_first_numbers_of_a_vector() -> None:
    llm = loaded(embedder("bert_mean"))
    whole, cut = llm.embed(TEXTS), llm.embed(TEXTS, dimensions=7)
    expected = whole[:, :7] / np.linalg.norm(whole[:, :7], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-6)
    with pytest.raises(RequestRefused) as caught:
        llm.embed(TEXTS, dimensions=49)
    assert (caught.value.refusal.field, caught.value.refusal.bound) == ("dimensions", (1, 48))


def test_a_model_refuses_what_it_does_not_do() -> None:
    for call in (
        lambda: loaded(embedder("bert_mean")).generate("a"),
        lambda: loaded(embedder("bert_mean")).generate("a", SamplingParams(max_tokens=1)),
        lambda: loaded(embedder("bert_mean")).chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1)),
        lambda: loaded(embedder("bert_mean")).add_request("one", "a", SamplingParams(max_tokens=1)),
        lambda: loaded(embedder("bert_mean")).step(),
        lambda: loaded(embedder("bert_mean")).score("a", "b"),
        lambda: loaded(classifier("bert_ce")).embed("a"),
        lambda: loaded(classifier("deberta_ce")).score("a", "b"),
        lambda: LLM("demo", kv_cache_bytes=2**26).embed("a"),
    ):
        with pytest.raises(RequestRefused) as caught:
            call()
        assert (caught.value.refusal.kind, caught.value.refusal.field) == ("unsupported", "model")


def test_an_encoder_that_is_a_decoder_generates(tmp_path: pathlib.Path) -> None:
    """BERT's class that generates is named as no other family's."""
    for architecture, pools in (("BertLMHeadModel", False), ("BertModel", True)):
        config = transformers.BertConfig(architectures=[architecture], is_decoder=not pools)
        config.save_pretrained(tmp_path)
        assert (read_pooling(tmp_path) is not None) is pools, architecture


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weights", "int8"),
        ("kv_cache_dtype", "int8"),
        ("prefix_store_bytes", 2**20),
        ("adapters", {"mine": "folder"}),
        ("max_model_len", 4096),
    ],
)
def test_options_of_generation_are_refused(option: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(str(embedder("bert_mean")), **{option: value})
    assert str(caught.value).split()[0] == option


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("modules.json", "pooling.Pooling", "pooling.WeightedLayerPooling"),
        ("modules.json", "sentence_transformers.base.modules.normalize.Normalize", "custom_st.Transformer"),
        ("1_Pooling/config.json", '"mean"', '"median"'),
        ("1_Pooling/config.json", '"include_prompt"', '"exclude_prompt"'),
        ("sentence_bert_config.json", '"transformer_task"', '"other_task"'),
    ],
)
def test_what_is_unknown_in_the_modules_is_refused(tmp_path: pathlib.Path, file: str, before: str, after: str) -> None:
    with pytest.raises(ModelError):
        read_pooling(with_change(embedder("bert_mean"), tmp_path / "changed", file, before, after))
