"""Models that generate and score pairs of texts, and models that read texts as messages, beside sentence-transformers
and transformers.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from manta import LLM
from manta.cluster.errors import RequestRefused
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.models.model_config import ModelError
from tests.pooled_checkpoints import (
    INSTRUCTION,
    SCORERS,
    TEXTS,
    classifier,
    conversing_embedder,
    embedder,
    generator,
    scorer,
    with_change,
)

QUERY, DOCUMENTS = TEXTS[2], [*TEXTS[:6], "", " yes\n", "{{ braces }} <|im_end|> {% raw %}"]
LONG = " ".join(TEXTS * 3)
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def loaded(folder: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(folder), num_threads=1, dtype="float32", **options)


def of_the_page(folder: pathlib.Path, documents: list[str], task: str = TASK) -> np.ndarray:
    """The scores that the code on Qwen3-Reranker's page gives."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = tokenizer.convert_tokens_to_ids(["no", "yes"])
    scores = []
    for document in documents:
        own = f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}"
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in (PREFIX, own, SUFFIX)]
        inputs = torch.tensor([[token for part in parts for token in part]])
        with torch.inference_mode():
            scores.append(model(input_ids=inputs).logits[0, -1, answers].log_softmax(0)[1].exp().item())
    return np.array(scores)


@pytest.mark.parametrize("options", [{}, {"task": "score"}], ids=["its page", "the option"])
def test_qwen3_reranker_as_first_published(options: dict[str, Any]) -> None:
    folder = generator() if options else generator("text-ranking")
    llm = loaded(folder, **options)
    np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), of_the_page(folder, DOCUMENTS), rtol=0, atol=1e-4)
    expected = of_the_page(folder, DOCUMENTS, INSTRUCTION)
    assert np.abs(expected - of_the_page(folder, DOCUMENTS)).max() > 0.01, "the instruction counts"
    found = llm.score(QUERY, DOCUMENTS, instruction=INSTRUCTION)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_another_model_scores_where_its_answer_begins() -> None:
    folder = generator(config_class="Qwen2Config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = []
    for document in DOCUMENTS:
        messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            no, yes = model(input_ids=inputs["input_ids"]).logits[0, -1, tokenizer.convert_tokens_to_ids(["no", "yes"])]
        expected.append((yes - no).sigmoid().item())
    found = loaded(folder, task="score").score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_sentence_transformers(name: str) -> None:
    llm, theirs = loaded(scorer(name)), CrossEncoder(str(scorer(name)), device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    found = llm.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found, theirs.predict(pairs), rtol=0, atol=1e-4)
    assert np.ptp(found) > 0.01
    other = theirs.predict(pairs, prompt="another task")
    np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS, instruction="another task"), other, rtol=0, atol=1e-4)


def test_truncation_keeps_query_instruction_and_the_end() -> None:
    """sentence-transformers once cut the end of the prompt, and peers cut the query."""
    llm, theirs = loaded(scorer("two_tokens")), CrossEncoder(str(scorer("two_tokens")), device="cpu")
    documents = [LONG, f"{LONG} end", LONG[: len(LONG) // 2]]
    with pytest.raises(RequestRefused) as caught:
        llm.score(QUERY, documents)
    assert (caught.value.refusal.kind, caught.value.refusal.field) == ("context_length", "texts[0]")
    found = llm.score(QUERY, documents, truncate=True)
    np.testing.assert_allclose(found, theirs.predict([(QUERY, each) for each in documents]), rtol=0, atol=1e-4)
    assert found[0] == pytest.approx(found[1], abs=1e-6), "what differs is cut"
    with pytest.raises(RequestRefused) as caught:
        llm.score(LONG, documents, truncate=True)
    assert (caught.value.refusal.kind, caught.value.refusal.bound) == ("unfit", None)


def test_a_model_without_a_word_about_ranking_generates(tmp_path: pathlib.Path) -> None:
    assert read_pooling(generator()) is None
    for page in (
        "pipeline_tag: text-ranking",
        "---\npipeline_tag: text-generation\n---",
        "---\n: [\n---\n",
        "---\n" + "[" * 500 + "\n---",
        "---\npipeline_tag: text-ranking",
        "",
    ):
        (tmp_path / "README.md").write_text(page)
        shutil.copy(generator() / "config.json", tmp_path)
        assert read_pooling(tmp_path) is None, page
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").symlink_to(generator("text-ranking") / "README.md")
    assert read_pooling(tmp_path) is None, "files outside the folder are not read"


def test_the_option_task() -> None:
    for folder in (generator("text-ranking"), scorer("two_tokens")):
        (output,) = loaded(folder, task="generate", kv_cache_bytes=2**22).generate([[5, 9, 17]], use_tqdm=False)
        assert output.outputs[0].token_ids
    assert read_pooling(embedder("bert_mean"), "embed") == read_pooling(embedder("bert_mean"))
    assert read_pooling(scorer("head"), "score") == read_pooling(scorer("head"))
    for folder, task in (
        (embedder("bert_mean"), "score"),
        (classifier("bert_ce"), "embed"),
        (classifier("deberta_ce"), "score"),
        (scorer("two_tokens"), "embed"),
    ):
        with pytest.raises(ModelError) as caught:
            LLM(str(folder), task=task)
        assert str(caught.value).split()[:2] == ["task", task]


def test_a_model_that_generates_gives_embeddings_if_asked() -> None:
    """The vectors are those that sentence-transformers makes of such a checkpoint if it takes texts as they are."""
    llm, theirs = loaded(generator(), task="embed"), SentenceTransformer(str(generator()), device="cpu")
    theirs[0].modality_config = {"text": theirs[0].modality_config["text"]}
    expected = theirs.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(llm.embed(TEXTS), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(llm.embed(TEXTS), axis=1), 1, atol=1e-5)


def test_vectors_of_messages_are_those_of_sentence_transformers() -> None:
    """Without the chat template they would be other vectors, and nobody would be told."""
    llm, theirs = loaded(conversing_embedder()), SentenceTransformer(str(conversing_embedder()), device="cpu")
    np.testing.assert_allclose(llm.embed(TEXTS), theirs.encode(TEXTS), rtol=0, atol=1e-3)
    expected = theirs.encode(TEXTS, prompt_name="task")
    np.testing.assert_allclose(llm.embed(TEXTS, prompt_name="task"), expected, rtol=0, atol=1e-3)
    for side in (LONG, f"{LONG} {LONG}"):
        expected = theirs.encode([side])
        np.testing.assert_allclose(llm.embed(side, truncate=True), expected, rtol=0, atol=1e-3)


def test_what_the_template_does_not_write_is_refused(tmp_path: pathlib.Path) -> None:
    """llama.cpp and vLLM gave every pair nearly the same score where the prompt was not the model's."""
    llm = loaded(scorer("two_tokens"))
    for call, field in (
        (lambda: llm.classify(TEXTS), "model"),
        (lambda: loaded(classifier("bert_ce")).score("a", "b", instruction="c"), "instruction"),
    ):
        with pytest.raises(RequestRefused) as caught:
            call()
        assert (caught.value.refusal.kind, caught.value.refusal.field) == ("unsupported", field)
    folder = tmp_path / "changed"
    shutil.copytree(scorer("two_tokens"), folder)
    for template, field in (
        ("{% for each in messages if each.role == 'user' %}{{ each.content }}{% endfor %}", "model"),
        ("{% for each in messages if each.role == 'query' %}{{ each.content }}{% endfor %}", "model"),
        ("{% for each in messages if each.role != 'system' %}{{ each.content }}{% endfor %}", "instruction"),
        ("{{ raise_exception('no') }}", "model"),
        (
            "{% for one in messages %}{{ one.content }}{{ one.content == 'b' and raise_exception('no') }}{% endfor %}",
            "texts[1]",
        ),
    ):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(RequestRefused) as caught:
            loaded(folder).score("a", ["a", "b"], instruction="c")
        assert caught.value.refusal.field == field


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("modules.json", "logit_score.LogitScore", "other.OtherScore"),
        ("1_LogitScore/config.json", '"true_token_id"', '"yes_token_id"'),
        ("1_LogitScore/config.json", '"causal_logits"', '"other_logits"'),
        ("sentence_bert_config.json", '"text-generation"', '"feature-extraction"'),
        ("sentence_bert_config.json", '"message"', '"pictures"'),
        ("sentence_bert_config.json", '"flat"', '"round"'),
        ("sentence_bert_config.json", '"add_generation_prompt"', '"max_length"'),
        ("sentence_bert_config.json", '"chat_template"', '"text"'),
    ],
)
def test_what_is_unknown_in_the_modules_is_refused(tmp_path: pathlib.Path, file: str, before: str, after: str) -> None:
    with pytest.raises(ModelError):
        read_pooling(with_change(scorer("one_token"), tmp_path / "changed", file, before, after))


def test_an_answer_that_is_no_token_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(scorer("two_tokens"), folder)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 400}))
    with pytest.raises(ModelError):
        loaded(folder)
    shutil.copytree(generator("text-ranking"), folder, dirs_exist_ok=True)
    (folder / "modules.json").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["never"] = tokenizer["model"]["vocab"].pop("no")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError):
        read_pooling(folder)
