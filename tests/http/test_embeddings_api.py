"""`/v1/embeddings` and Ollama's two endpoints, asked by other people's clients, beside sentence-transformers.

The tests import the clients that take a second to import: every process of the suite imports this module.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import ollama
import openai
import pydantic
import pytest

from manta.cluster.batch.line_endpoints import batch_endpoints
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve.engine.model_replica import make_replica
from tests.local_server import Handle, ThreadedServer
from tests.patience import PATIENCE_S
from tests.pooled_checkpoints import MAX_TOKENS, TEXTS, embedder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

LONG = "the manta ray " * 100


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    started = ThreadedServer("engine.max_num_waiting=8", folder=embedder("xlm_roberta"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def theirs() -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(embedder("xlm_roberta")), device="cpu")


def asked(server: ThreadedServer, path: str = "/v1/embeddings", **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": server.model, **fields}, timeout=PATIENCE_S)


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]])


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


def test_openai_client(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    client, expected = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"), theirs.encode(TEXTS)
    for form in ("float", "base64", None):  # the client's own default is base64
        options: Any = {} if form is None else {"encoding_format": form}
        answer = client.embeddings.create(model=server.model, input=TEXTS, **options)
        found = [each.embedding for each in answer.data]
        if form == "base64":
            found = [np.frombuffer(base64.b64decode(str(each)), dtype="<f4") for each in found]
        np.testing.assert_allclose(np.array(found), expected, atol=1e-5)
        assert [each.index for each in answer.data] == list(range(len(TEXTS)))
        num_tokens = sum(map(len, theirs.tokenizer(TEXTS)["input_ids"]))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    card = {"max_model_len": MAX_TOKENS, "task": "embed", "root": server.model, "parent": None}
    assert client.models.list().data[0].model_extra == card


def test_ollama_client(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    client = ollama.Client(host=server.url)
    expected = theirs.encode(TEXTS)
    np.testing.assert_allclose(np.array(client.embed(server.model, TEXTS).embeddings), expected, atol=1e-5)
    np.testing.assert_allclose(client.embeddings(server.model, TEXTS[0]).embedding, expected[0], atol=1e-5)
    assert client.embed(server.model, "").embeddings == []
    assert len(client.embed(server.model, LONG).embeddings) == 1
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed(server.model, LONG, truncate=False)
    assert caught.value.status_code == 400
    assert client.show(server.model).capabilities == ["embedding"]


def test_all_forms_of_input_give_the_same_vectors(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    ids = theirs.tokenizer(TEXTS[:2])["input_ids"]
    expected = theirs.encode(TEXTS[:2])
    for given in (TEXTS[:2], ids):
        np.testing.assert_allclose(vectors(asked(server, input=given)), expected, atol=1e-5)
    for single in (TEXTS[0], ids[0], [TEXTS[0]]):
        np.testing.assert_allclose(vectors(asked(server, input=single)), expected[:1], atol=1e-5)


def test_equal_texts_give_equal_vectors_whatever_else_is_in_the_batch(server: ThreadedServer) -> None:
    alone = vectors(asked(server, input=TEXTS[0]))[0]
    for others in (TEXTS, TEXTS[::-1], [TEXTS[0]] * 40, [LONG[:300]] * 9):
        found = vectors(asked(server, input=[*others, TEXTS[0]]))
        np.testing.assert_allclose(found[-1], alone, atol=1e-5)


def test_prompts_by_name(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    expected = theirs.encode(TEXTS, prompt_name="query")
    np.testing.assert_allclose(vectors(asked(server, input=TEXTS, prompt_name="query")), expected, atol=1e-5)
    status, field, _ = refusal(asked(server, input="a", prompt_name="none such"))
    assert (status, field) == (400, "prompt_name")


def test_dimensions_are_divided_by_their_length(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    whole = theirs.encode(TEXTS)[:, :10]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(asked(server, input=TEXTS, dimensions=10)), expected, atol=1e-5)
    for dimensions in (0, 49):
        assert refusal(asked(server, input="a", dimensions=dimensions)) == (400, "dimensions", "invalid_value")


def test_truncation_must_be_asked_for(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    assert refusal(asked(server, input=["a", LONG])) == (400, "input[1]", "context_length_exceeded")
    assert refusal(asked(server, input=[3] * 121)) == (400, "input", "context_length_exceeded")
    cut = vectors(asked(server, input=LONG, truncate_prompt_tokens=-1))
    np.testing.assert_allclose(cut, theirs.encode([LONG]), atol=1e-5)
    answer = asked(server, input=LONG, truncate_prompt_tokens=20, truncation_side="left")
    assert answer.json()["usage"]["prompt_tokens"] == 20
    assert refusal(asked(server, input="a", truncation_side="left"))[1] == "truncation_side"
    assert refusal(asked(server, input="a", truncate_prompt_tokens=0))[1] == "truncate_prompt_tokens"


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_prompt(server: ThreadedServer, theirs: SentenceTransformer, side: str) -> None:
    text = "the river of the ocean and the dog in the sun " * 12
    cls, *tokens, sep = theirs.tokenizer("passage: " + text)["input_ids"]
    num_prompt = len(theirs.tokenizer("passage: ")["input_ids"]) - 2
    rest = tokens[num_prompt:28] if side == "right" else tokens[num_prompt - 28 :]
    expected = vectors(asked(server, input=[cls, *tokens[:num_prompt], *rest, sep]))
    fields = {"prompt_name": "passage", "truncate_prompt_tokens": 30, "truncation_side": side}
    np.testing.assert_allclose(vectors(asked(server, input=text, **fields)), expected, atol=1e-5)
    assert refusal(asked(server, input=LONG, prompt_name="passage", truncate_prompt_tokens=3))[:2] == (400, "input")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/api/generate", {"prompt": "a"}),
    ],
)
def test_a_model_that_pools_generates_nothing(server: ThreadedServer, path: str, fields: dict[str, Any]) -> None:
    answer = asked(server, path, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert isinstance(error, str) or error["param"] == "model"


def test_wrong_fields_are_named(server: ThreadedServer) -> None:
    assert refusal(asked(server, input=[]))[1] == "input"
    assert refusal(asked(server, input=["a", 1]))[1] == "input[1]"
    assert refusal(asked(server, input=[[1], [2, 999]]))[1] == "input[1]"
    assert refusal(asked(server, input="a", encoding_format="hex"))[1] == "encoding_format"
    assert refusal(asked(server, input="a", dimension=4))[1] == "dimension"
    assert asked(server, input="a", colour="red").headers["x-manta-ignored"] == "colour"
    assert refusal(asked(server, model="other", input="a")) == (404, "model", "model_not_found")
    too_many = asked(server, input=["a"] * 2049)
    assert refusal(too_many)[:2] == (400, "input")


def test_the_metrics_count_texts_as_requests(server: ThreadedServer) -> None:
    before = server.metrics()["manta:prompt_tokens_total"]
    num_tokens = asked(server, input=TEXTS).json()["usage"]["prompt_tokens"]
    assert server.metrics()["manta:prompt_tokens_total"] == before + num_tokens


def test_an_engine_that_pools_tells_its_configuration(server: ThreadedServer) -> None:
    """Without it an update of such a model would never show as settled."""
    assert server.metrics()["manta:engine_configurations"] == 1


def test_home_shows_a_request_that_works(server: ThreadedServer) -> None:
    example = json.loads(server.get("/"))["example"]
    assert "/v1/embeddings" in example


def test_langchain_client(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    import langchain_openai

    base_url: Any = f"{server.url}/v1"
    client = langchain_openai.OpenAIEmbeddings(
        model=server.model, base_url=base_url, api_key=pydantic.SecretStr("none"), check_embedding_ctx_length=False
    )
    expected = theirs.encode(TEXTS)
    np.testing.assert_allclose(np.array(client.embed_documents(TEXTS)), expected, atol=1e-5)
    np.testing.assert_allclose(np.array(client.embed_query(TEXTS[0])), expected[0], atol=1e-5)


def test_llama_index_client(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    from llama_index.embeddings.openai import OpenAIEmbedding

    client = OpenAIEmbedding(model_name=server.model, api_base=f"{server.url}/v1", api_key="none")
    found = client.get_text_embedding_batch(TEXTS)
    np.testing.assert_allclose(np.array(found), theirs.encode(TEXTS), atol=1e-5)


def test_litellm_client(server: ThreadedServer, theirs: SentenceTransformer) -> None:
    import litellm

    expected = theirs.encode(TEXTS)
    for provider, base in (("openai", f"{server.url}/v1"), ("hosted_vllm", f"{server.url}/v1"), ("ollama", server.url)):
        answer = litellm.embedding(f"{provider}/{server.model}", input=TEXTS, api_base=base, api_key="none")
        found = [each["embedding"] for each in answer.data]
        np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_lines_of_a_batch(theirs: SentenceTransformer) -> None:
    folder = embedder("xlm_roberta")
    options = {"model": str(folder), "dtype": "float32", "num_threads": 1}

    async def main() -> list[BatchResponse]:
        replica = await asyncio.to_thread(make_replica, EngineConfig(**options))
        endpoints, client = batch_endpoints(ServeConfig(engine=EngineConfig(**options)), Handle(replica), "127.0.0.1")
        bodies = [{"input": text} for text in TEXTS] + [{"input": LONG}]
        lines = [BatchRequest("a", "/v1/embeddings", msgspec.Raw(json.dumps(body).encode())) for body in bodies]
        try:
            await client.drop_kept([b"a block that models of another kind may keep"])
            return await asyncio.gather(*(endpoints.answer(line, f"line-{i}") for i, line in enumerate(lines)))
        finally:
            await client.close()
            await asyncio.to_thread(replica.close)

    *answers, refused = asyncio.run(main())
    found = [json.loads(bytes(answer.body))["data"][0]["embedding"] for answer in answers]
    np.testing.assert_allclose(np.array(found), theirs.encode(TEXTS), atol=1e-5)
    assert refused.status_code == 400
