"""Typed answers: the probabilities of all allowed ones are those of draws under a constraint that allows no others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from manta import LLM, SamplingParams
from manta.cluster.chat.decided import AnswerPath, probabilities
from manta.cluster.config import ServeConfig
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import Admission
from manta.workers.step import TokenLogprobs
from tests.checkpoints import EOS_TOKEN_ID, checkpoint, reference_logits
from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S

TEXT = "The manta ray is a large fish."
PREDICATE = {"type": "predicate", "name": "fish", "instructions": "It is about a fish."}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "What is it about?"}],
    "choices": [
        {"value": "fish", "description": "animals"},
        {"value": "fishing"},
        {"value": "the sun"},
        {"value": True},
    ],
}
SCORE = {"type": "score", "instructions": "How long is it?", "levels": [{"label": each} for each in ("short", "long")]}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    started = ThreadedServer()
    yield started
    started.stop()


def asked(server: ThreadedServer, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "input": TEXT, "questions": [PREDICATE], **fields}
    return httpx.post(f"{server.url}/v1/decisions", json=body, timeout=PATIENCE_S)


def answered(server: ThreadedServer, **fields: Any) -> dict[str, Any]:
    answer = asked(server, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(server: ThreadedServer, text: str) -> list[int]:
    """The tokens of a chat of one message, as the server counts them."""
    body = {"model": server.model, "messages": [{"role": "user", "content": text}]}
    answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE_S)
    return list(answer.json()["tokens"])


def tokens_of(server: ThreadedServer, text: str) -> list[int]:
    body = {"model": server.model, "prompt": text, "add_special_tokens": False}
    return list(httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE_S).json()["tokens"])


def expected(prompt: list[int], answers: list[list[int]]) -> list[float]:
    """The probability of each answer by transformers, one draw after the other among the tokens that go on."""
    found = []
    for answer in answers:
        probability = 1.0
        for depth in range(len(answer)):
            allowed = {each[depth] for each in answers if len(each) > depth and each[:depth] == answer[:depth]}
            logits = reference_logits(checkpoint("llama"), [*prompt, *answer[:depth]])[-1]
            logprobs = logits.double().log_softmax(-1)
            probability *= math.exp(logprobs[answer[depth]]) / sum(math.exp(logprobs[each]) for each in allowed)
        found.append(probability)
    return found


def asked_text(*lines: str) -> str:
    return "\n".join([f"{TEXT}\n\n{lines[0]}", *lines[1:]])


def test_probabilities_are_those_of_constrained_draws(server: ThreadedServer) -> None:
    found = answered(server, questions=[PREDICATE, CHOICE, SCORE])
    predicate, choice, score = found["answers"]
    question = "Is this true of the text above? It is about a fish."
    prompt = prompt_of(server, asked_text(question, "Answer with yes or no, and nothing else."))
    (yes, _) = expected(prompt, [tokens_of(server, each) for each in ("yes", "no")])
    assert predicate == {"type": "predicate", "name": "fish", "probability": pytest.approx(yes, abs=1e-5)}

    values = ["fish", "fishing", "the sun", "true"]
    lines = ("- fish: animals", "- fishing", "- the sun", "- true")
    prompt = prompt_of(server, asked_text("What is it about?", "Answer with one of these, and nothing else:", *lines))
    wanted = expected(prompt, [[*tokens_of(server, each), EOS_TOKEN_ID] for each in values])
    probabilities = [each["probability"] for each in choice["probabilities"]]
    np.testing.assert_allclose(probabilities, wanted, rtol=0, atol=1e-5)
    assert sum(probabilities) == pytest.approx(1, abs=1e-9)
    given = ["fish", "fishing", "the sun", True]
    assert [each["value"] for each in choice["probabilities"]] == given
    assert (choice["name"], choice["confidence"]) == (None, max(probabilities))
    assert choice["choice"] == given[int(np.argmax(probabilities))]

    shown = [(each["label"], each["value"]) for each in score["probabilities"]]
    assert shown == [("short", 0), ("long", 1)]
    assert score["score"] == pytest.approx(score["probabilities"][1]["probability"])
    usage = found["usage"]
    assert usage["input_tokens"] == usage["total_tokens"] > 0
    assert usage["output_tokens"] == 0


def test_answers_share_the_questions_prompt_in_the_prefix_cache(server: ThreadedServer) -> None:
    """Those of one body too. What is read from the cache changes no probability."""
    first, again = (answered(server, input=f"Again: {TEXT}", questions=[CHOICE]) for _ in range(2))
    for left, right in zip(*(each["answers"][0]["probabilities"] for each in (first, again)), strict=True):
        assert left["probability"] == pytest.approx(right["probability"], abs=1e-5)
    num_read, num_read_again = (each["usage"]["input_tokens_details"]["cached_tokens"] for each in (first, again))
    num_answers = len(CHOICE["choices"])
    num_leading, rest = divmod(num_read_again, num_answers)
    assert num_leading > 0
    assert rest == 0
    assert num_read >= num_leading * (num_answers - 1)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_an_answer_without_a_finite_probability_is_a_failure(
    server: ThreadedServer, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(kernels: Any, logits: Any, next_token_ids: list[int], *_: Any) -> list[TokenLogprobs]:
        return [TokenLogprobs(token_id, value, 1, [], []) for token_id in next_token_ids]

    monkeypatch.setattr("manta.workers.torch_worker.model_runner.prompt_logprobs", broken)
    answer = asked(server, input=f"{TEXT} {value}")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


def test_an_input_of_items_is_asked_in_its_last_message(server: ThreadedServer) -> None:
    alone = answered(server)["answers"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]
    assert answered(server, input=items)["answers"] == alone
    assert answered(server, input=[*items, {"role": "assistant", "content": "Yes."}])["answers"] != alone


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ""}, "input"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": f"{each}"} for each in range(255)]}] * 5}, "questions"),
        ({"questions": [{**PREDICATE, "instructions": ""}]}, "questions[0].instructions"),
        ({"questions": [PREDICATE, {**CHOICE, "choices": CHOICE["choices"][:1]}]}, "questions[1].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": True}, {"value": "true"}]}]}, "questions[0].choices"),
        ({"questions": [{**SCORE, "levels": [{"label": str(each)} for each in range(11)]}]}, "questions[0].levels"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": ""}]}]}, "questions[0]"),
        (
            {"questions": [{**PREDICATE, "instructions": [{"type": "input_image"}]}]},
            "questions[0].instructions[0].type",
        ),
        ({"questions": [{"type": "box", "instructions": "a"}]}, "questions[0].type"),
        ({"input": TEXT * 100}, "questions"),
    ],
)
def test_a_mistake_is_named(server: ThreadedServer, fields: dict[str, Any], field: str) -> None:
    answer = asked(server, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_prompts_of_all_answers_are_bounded_together() -> None:
    admission = Admission(ServeConfig(max_body_bytes=80_000))
    admission.check_repeated(10_000)
    with pytest.raises(RequestRefused) as refused:
        admission.check_repeated(10_001)
    refusal = refused.value.refusal
    assert (refusal.kind, refusal.field, refusal.value, refusal.bound) == ("over_limit", "questions", 10_001, 10_000)


def test_probabilities_of_paths_in_closed_form() -> None:
    """The second token of the first answer is forced, so its own probability does not count."""
    half, tenth = math.log(0.5), math.log(0.1)
    paths = [AnswerPath(0, (1, 2)), AnswerPath(1, (3, 4)), AnswerPath(1, (3, 5))]
    found = probabilities(paths, [[tenth, tenth], [half, half], [half, tenth]])
    assert found == pytest.approx([1 / 6, 5 / 6])


@pytest.mark.prove
def test_ten_thousand_draws(server: ThreadedServer) -> None:
    """By a chi-squared test, at a level that one correct run in a million misses."""
    lines = ("- fish", "- fishing", "- the sun")
    choices = [{"value": line[2:]} for line in lines]
    question = {"type": "choice", "instructions": "What is it about?", "choices": choices}
    (answer,) = answered(server, questions=[question])["answers"]
    prompt = prompt_of(server, asked_text("What is it about?", "Answer with one of these, and nothing else:", *lines))
    paths = [(*tokens_of(server, each["value"]), EOS_TOKEN_ID) for each in choices]
    llm, draws, seeds = LLM(str(checkpoint("llama")), dtype="float32", kv_cache_bytes=2**24), 10_000, itertools.count()
    counts: dict[tuple[int, ...], int] = {(): draws}
    while set(counts) - set(paths):
        begun = next(iter(set(counts) - set(paths)))
        allowed = tuple({path[len(begun)] for path in paths if path[: len(begun)] == begun})
        left = counts.pop(begun)
        params = [
            SamplingParams(n=min(200, left - done), max_tokens=1, allowed_token_ids=allowed, seed=next(seeds))
            for done in range(0, left, 200)
        ]
        outputs = llm.generate([[*prompt, *begun]] * len(params), params, use_tqdm=False)
        for each in itertools.chain.from_iterable(output.outputs for output in outputs):
            path = (*begun, each.token_ids[0] if each.token_ids else EOS_TOKEN_ID)
            counts[path] = counts.get(path, 0) + 1
    wanted = [draws * each["probability"] for each in answer["probabilities"]]
    statistic = sum((counts.get(path, 0) - each) ** 2 / each for path, each in zip(paths, wanted, strict=True))
    assert statistic < 27.6
