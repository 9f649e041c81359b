"""A model that scores pairs by its answer, over HTTP: its own instruction and another, cuts, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch

from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S
from tests.pooled_checkpoints import INSTRUCTION, MAX_PROMPT_TOKENS, TEXTS, scorer

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

QUERY, DOCUMENTS = TEXTS[2], TEXTS[:6]
LONG = " ".join(TEXTS * 3)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    started = ThreadedServer(folder=scorer("two_tokens"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def theirs() -> CrossEncoder:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(scorer("two_tokens")), device="cpu")


def asked(server: ThreadedServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": server.model, **fields}, timeout=PATIENCE_S)


def scores(server: ThreadedServer, **fields: Any) -> list[float]:
    """Scores of documents in their order, which `/v1/rerank` gives in another one."""
    answer = asked(server, "/v1/rerank", query=QUERY, **fields)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    found = [each["relevance_score"] for each in results]
    assert found == sorted(found, reverse=True)
    assert all(0 < score < 1 for score in found), "it is a probability, once"
    return [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])]


def test_scores_of_documents_and_pairs(server: ThreadedServer, theirs: CrossEncoder) -> None:
    pairs = [(QUERY, text) for text in DOCUMENTS]
    expected = theirs.predict(pairs)
    np.testing.assert_allclose(scores(server, documents=DOCUMENTS), expected, rtol=0, atol=1e-4)
    data = asked(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    np.testing.assert_allclose([each["score"] for each in data], expected, rtol=0, atol=1e-4)
    expected = theirs.predict(pairs, prompt="another task")
    found = scores(server, documents=DOCUMENTS, instruction="another task")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def num_texts(server: ThreadedServer) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    (line,) = (line for line in lines if line.startswith("manta:pooled_texts_total"))
    return float(line.split()[-1])


def test_a_metric_counts_answered_texts(server: ThreadedServer) -> None:
    before = num_texts(server)
    scores(server, documents=DOCUMENTS)
    assert asked(server, "/rerank", query=QUERY, documents=[LONG]).status_code == 400
    assert num_texts(server) == before + len(DOCUMENTS)


def cut_score(theirs: CrossEncoder, most: int, side: str) -> float:
    """The score of `LONG` by transformers, cut to so many tokens behind the space that the template writes."""
    tokenizer, model = theirs[0].tokenizer, theirs[0].model
    texts = {"system": INSTRUCTION, "query": QUERY, "document": LONG}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    parts = tokenizer.apply_chat_template(messages, tokenize=False).partition(LONG)
    before, own, behind = (tokenizer.encode(part, add_special_tokens=False) for part in parts)
    assert tokenizer.encode("".join(parts), add_special_tokens=False) == before + own + behind
    kept = own[:most] if side == "right" else own[-most:]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([before + kept + behind])).logits[0, -1]
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    return float((logits[yes] - logits[no]).sigmoid())


def test_only_documents_are_cut(server: ThreadedServer, theirs: CrossEncoder) -> None:
    documents = [LONG, "a"]
    answer = asked(server, "/rerank", query=QUERY, documents=documents)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[0]")
    found = scores(server, documents=documents, truncate_prompt_tokens=-1)
    expected = theirs.predict([(QUERY, text) for text in documents])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    most = MAX_PROMPT_TOKENS // 2
    shorter: Any = {"text": {"max_length": most}}
    expected = theirs.predict([(QUERY, text) for text in documents], processing_kwargs=shorter)
    found = scores(server, documents=documents, truncate_prompt_tokens=most)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for side in ("right", "left"):
        limits = {"max_tokens_per_doc": 40, "truncate_prompt_tokens": -1, "truncation_side": side}
        found = scores(server, documents=[LONG], **limits)
        np.testing.assert_allclose(found, [cut_score(theirs, 40, side)], rtol=0, atol=1e-4)
    for fields in ({"query": LONG, "truncate_prompt_tokens": -1}, {"query": QUERY, "truncate_prompt_tokens": 9}):
        answer = asked(server, "/rerank", documents=["a"], **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "query")


@pytest.mark.parametrize("path", ["/v1/classify", "/pooling", "/v1/embeddings", "/v1/completions"])
def test_what_it_does_not_answer(server: ThreadedServer, path: str) -> None:
    text = {"prompt": "a"} if path == "/v1/completions" else {"input": "a"}
    answer = asked(server, path, **text)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
