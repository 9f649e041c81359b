"""`/rerank`, `/score`, `/classify` and `/pooling`, beside transformers and asked by Cohere's and LiteLLM's clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S
from tests.pooled_checkpoints import MAX_TOKENS, TEXTS, classifier

QUERY, DOCUMENTS = TEXTS[2], TEXTS[:8]
LONG = " ".join(TEXTS)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    started = ThreadedServer(folder=classifier("bert_ce"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(classifier("bert_ce"))


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(classifier("bert_ce")).eval()


@pytest.fixture(scope="module")
def expected(tokenizer: Any, model: Any) -> np.ndarray:
    """Scores of `DOCUMENTS` beside `QUERY`, by transformers."""
    return np.array([of_inputs(model, tokenizer(QUERY, text, return_tensors="pt")) for text in DOCUMENTS])


def of_inputs(model: Any, inputs: Any) -> float:
    with torch.inference_mode():
        return model(**inputs).logits.sigmoid().item()


def asked(server: ThreadedServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": server.model, **fields}, timeout=PATIENCE_S)


def answered(server: ThreadedServer, path: str, **fields: Any) -> dict[str, Any]:
    answer = asked(server, path, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: ThreadedServer, path: str, **fields: Any) -> str:
    answer = asked(server, path, **fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(server: ThreadedServer, expected: np.ndarray, path: str) -> None:
    answer = answered(server, path, query=QUERY, documents=DOCUMENTS)
    found = answer["results"]
    assert [each["index"] for each in found] == list(np.argsort(-expected, kind="stable"))
    scores = [each["relevance_score"] for each in found]
    np.testing.assert_allclose(scores, -np.sort(-expected), atol=1e-4)
    assert ("document" in found[0]) == (path != "/v2/rerank")
    assert answer["usage"]["total_tokens"] > 0


def test_the_best_documents_with_their_texts(server: ThreadedServer, expected: np.ndarray) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    (best,) = answered(server, "/v2/rerank", query=QUERY, documents=documents, top_n=1, return_documents=True)[
        "results"
    ]
    assert best["document"] == documents[int(expected.argmax())]


def test_cohere_client(server: ThreadedServer, expected: np.ndarray) -> None:
    import cohere

    for client in (cohere.Client("none", base_url=server.url), cohere.ClientV2("none", base_url=server.url)):
        answer = client.rerank(model=server.model, query=QUERY, documents=DOCUMENTS, top_n=3)
        assert [each.index for each in answer.results] == list(np.argsort(-expected, kind="stable")[:3])
        assert answer.results[0].relevance_score == pytest.approx(expected.max(), abs=1e-4)


def test_litellm_client(server: ThreadedServer, expected: np.ndarray) -> None:
    import litellm

    for provider in ("cohere", "jina_ai", "hosted_vllm"):
        answer = litellm.rerank(
            f"{provider}/{server.model}", query=QUERY, documents=DOCUMENTS, api_base=server.url, api_key="none"
        )
        assert answer.results is not None
        assert [each["index"] for each in answer.results] == list(np.argsort(-expected, kind="stable"))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(server: ThreadedServer, expected: np.ndarray, path: str) -> None:
    for first in (QUERY, [QUERY], [QUERY] * len(DOCUMENTS)):
        answer = answered(server, path, text_1=first, text_2=DOCUMENTS)
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-4)
    answer = answered(server, path, text_1=QUERY, text_2=DOCUMENTS[0])
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected[:1], atol=1e-4)


def test_labels_and_raw_numbers(server: ThreadedServer, tokenizer: Any, model: Any) -> None:
    expected = [of_inputs(model, tokenizer(text, return_tensors="pt")) for text in DOCUMENTS]
    data = answered(server, "/v1/classify", input=DOCUMENTS)["data"]
    assert {each["label"] for each in data} == {"LABEL_0"}
    np.testing.assert_allclose([each["probs"][0] for each in data], expected, atol=1e-4)
    data = answered(server, "/pooling", input=DOCUMENTS)["data"]
    np.testing.assert_allclose([each["data"][0] for each in data], expected, atol=1e-4)


def test_truncation_never_cuts_the_query(server: ThreadedServer, tokenizer: Any, model: Any) -> None:
    fields: dict[str, Any] = {"query": QUERY, "documents": ["a", LONG]}
    assert refused(server, "/rerank", **fields) == "documents[1]"
    cut = tokenizer(QUERY, LONG, truncation="only_second", max_length=MAX_TOKENS, return_tensors="pt")
    results = answered(server, "/rerank", **fields, truncate_prompt_tokens=-1)["results"]
    (score,) = (each["relevance_score"] for each in results if each["index"] == 1)
    assert score == pytest.approx(of_inputs(model, cut), abs=1e-4)
    ids = tokenizer(QUERY)["input_ids"], tokenizer(LONG, add_special_tokens=False)["input_ids"]
    for side, kept in (("right", ids[1][:9]), ("left", ids[1][-9:])):
        tokens = [*ids[0], *kept, 3]
        types = [0] * len(ids[0]) + [1] * (len(kept) + 1)
        inputs = {"input_ids": torch.tensor([tokens]), "token_type_ids": torch.tensor([types])}
        for limit in ({"max_tokens_per_doc": 9}, {"truncate_prompt_tokens": len(tokens)}):
            if "truncate_prompt_tokens" in limit:
                limit["truncation_side"] = side
            elif side == "left":
                continue
            (found,) = answered(server, "/rerank", query=QUERY, documents=[LONG], **limit)["results"]
            assert found["relevance_score"] == pytest.approx(of_inputs(model, inputs), abs=1e-4)
    assert refused(server, "/rerank", **fields, truncate_prompt_tokens=8) == "query"
    assert refused(server, "/rerank", query=LONG, documents=["a"], truncate_prompt_tokens=-1) == "query"


def test_wrong_use_is_named(server: ThreadedServer) -> None:
    assert refused(server, "/v1/embeddings", input="a") == "model"
    assert refused(server, "/rerank", query="a", documents=[]) == "documents"
    assert refused(server, "/rerank", query="a", documents=["b"], top_n=0) == "top_n"
    assert refused(server, "/score", text_1=["a", "b"], text_2=["c"]) == "text_1"
    assert refused(server, "/score", text_1="a", text_2=[]) == "text_2"
    assert refused(server, "/classify", input=[]) == "input"
