"""Extreme numbers cost their own request at most: each is refused at admission, or fails one sequence and no step."""

from __future__ import annotations

import asyncio
import json
import math
import typing
from typing import Any

import msgspec
import pytest
import torch

from manta.cluster.engine.engine import Engine
from manta.cluster.engine.ranks.rank_channel import Listener, RankChannel, connect
from manta.cluster.engine.ranks.rank_messages import Done, Register
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.cluster.errors import RequestRefused
from manta.workers.sampling_params import BOUNDS, SamplingParams
from tests.engine.test_engine import drain, run
from tests.engine.test_engine import make_engine as make_plain_engine
from tests.fuzz.http.connection import connect as connect_client
from tests.fuzz.http.connection import encoded, request
from tests.fuzz.http.good import CHAT
from tests.local_server import local_server
from tests.patience import PATIENCE_S

PROMPT = [5, 9, 17, 30, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def forced(**fields: Any) -> SamplingParams:
    """Parameters that no admission would let through."""
    params = msgspec.structs.replace(GREEDY)
    for name, value in fields.items():
        msgspec.structs.force_setattr(params, name, value)
    return params


# ---- one place for every bound -------------------------------------------------------------------------------------


def test_every_number_of_the_parameters_has_a_bound() -> None:
    hints = typing.get_type_hints(SamplingParams)
    numbers = {name for name, hint in hints.items() if {int, float} & ({hint} | set(typing.get_args(hint)))}
    collections = {"logit_bias", "stop_token_ids", "allowed_token_ids", "prediction_token_ids"}
    assert numbers - collections == set(BOUNDS)


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_outside_their_bounds_are_refused_by_name(name: str) -> None:
    bound = BOUNDS[name]
    for value in (bound.low - 1, bound.high + 1, -(10**400), 10**400, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"^{name} .*must be between") as refusal:
            SamplingParams(**{name: value})
        assert len(str(refusal.value)) < 200
    SamplingParams(**{name: bound.high})


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("stop_token_ids", {"stop_token_ids": (2**70,)}),
        ("allowed_token_ids", {"allowed_token_ids": (1, -(10**400))}),
        ("prediction_token_ids", {"prediction_token_ids": (-1,)}),
        ("bad_words_token_ids", {"bad_words_token_ids": ((1, 2**31),)}),
        ("logit_bias", {"logit_bias": {10**400: 1.0}}),
        ("logit_bias", {"logit_bias": {1: 1e308}}),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams(**fields)


# ---- admission -----------------------------------------------------------------------------------------------------

EXTREME_BODIES: dict[str, tuple[str, Any]] = {
    "min_tokens beyond the table": ("min_tokens", 3_000_000_000),
    "min_tokens beyond the sequence": ("min_tokens", 100_000),
    "top_k of 70 bits": ("top_k", 2**70),
    "max_tokens of 70 bits": ("max_tokens", 2**70),
    "logit_bias of 70 bits": ("logit_bias", {str(2**70): 1}),
    "a processor's argument of 70 bits": (
        "logits_processors",
        [{"name": "manta_example.only", "arguments": {"of": [2**70]}}],
    ),
    "repetition_penalty near 0": ("repetition_penalty", 1e-38),
}


async def _refusal(case: str) -> tuple[int, dict[str, Any], bool]:
    """Of a chat, which goes on to the context length unless it says how far."""
    name, value = EXTREME_BODIES[case]
    async with local_server() as server:
        fields = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        connection = await connect_client(server.port, [])
        await connection.send(request(CHAT, encoded({**fields, name: value})))
        answer = await connection.answer()
        connection.close()
        again, _ = await server.post(max_tokens=3)
        await server.until_idle()
        return answer.status, json.loads(answer.body), again == 200


@pytest.mark.few(3)
@pytest.mark.parametrize("case", EXTREME_BODIES)
def test_extreme_numbers_over_http_are_refused(case: str) -> None:
    status, answer, goes_on = asyncio.run(_refusal(case))
    assert status == 400, answer
    assert str(answer["error"]["param"]).startswith(EXTREME_BODIES[case][0])
    assert goes_on


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {1: 2**70}), ("stop", ("\ud800",)), ("min_tokens", 10_000)],
    ids=["a number", "half a character", "a count"],
)
def test_parameters_that_cannot_be_encoded_are_refused(field: str, value: Any) -> None:
    engine = make_plain_engine("llama")
    request = EngineRequest(
        request_id="a", prompt_token_ids=PROMPT, params=forced(**{"max_tokens": None, field: value})
    )
    with pytest.raises(RequestRefused) as refusal:
        engine.add_request(request)
    assert refusal.value.refusal.field == field
    assert not engine.has_unfinished


def test_a_message_that_cannot_be_encoded_changes_nothing() -> None:
    listener = Listener("127.0.0.1")
    rank = connect(listener.address, 0)
    ranks = RankChannel(listener.accept(1))
    try:
        with pytest.raises(OverflowError):
            ranks.ask(Register("name", 2**70), 0)  # type: ignore[arg-type]
        assert ranks.collect(0.0) == [], "no answer is awaited"
        ranks.ask(Register("name", b""), 0)
        data = msgspec.msgpack.encode(Done())
        rank.sendall(len(data).to_bytes(4, "little") + data)
        assert ranks.collect(PATIENCE_S) == [Done()]
    finally:
        ranks.close()
        rank.close()


# ---- a start that fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_sequence_that_cannot_be_started_fails_alone(overlap: str, n: int) -> None:
    """As its parameters would overflow a table of the rank. Others in its batch keep their tokens."""
    expected = run(make_plain_engine("llama"), [PROMPT], GREEDY)[0]
    plain = make_plain_engine("llama")
    engine = Engine(msgspec.structs.replace(plain.config, overlap=overlap))
    bad = forced(min_tokens=5, n=n)
    engine.add_request(EngineRequest(request_id="good", prompt_token_ids=PROMPT, params=GREEDY))
    engine.add_request(EngineRequest(request_id="bad", prompt_token_ids=[3, 4, 5], params=bad))
    msgspec.structs.force_setattr(bad, "min_tokens", 2**40)
    outputs = drain(engine)
    ends = {(output.request_id, output.index): output for output in outputs if output.finish is not None}
    failed = [ends["bad", index] for index in range(n)]
    assert {output.finish for output in failed} == {FinishStatus.FINISHED_INTERNAL_ERROR}
    assert all("could not be started: OverflowError" in (output.error or "") for output in failed)
    assert tokens_of(outputs, "bad") == []
    assert tokens_of(outputs, "good") == expected
    assert engine.alive
    assert run(engine, [PROMPT], GREEDY)[0] == expected, "the engine goes on"


def tokens_of(outputs: list[SequenceOutput], request_id: str) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]


# ---- logits that overflow ------------------------------------------------------------------------------------------


def test_an_overflow_after_edits_keeps_the_prefix_cached() -> None:
    """The model's logits were valid, so the blocks that the request read and wrote stay."""
    engine = make_plain_engine("llama")
    prompt = PROMPT * 4
    run(engine, [prompt], GREEDY)
    bad = EngineRequest(request_id="bad", prompt_token_ids=prompt, params=forced(repetition_penalty=1e-40))
    engine.add_request(bad)
    (end,) = [output for output in drain(engine) if output.finish is not None]
    assert end.finish is FinishStatus.FINISHED_INTERNAL_ERROR
    assert end.error is not None
    assert "repetition_penalty" in end.error
    hits = engine.stats().prefix_cache_hits
    run(engine, [prompt], GREEDY)
    assert engine.stats().prefix_cache_hits == hits + len(prompt) // 16 * 16


# ---- parameters that contradict each other ---------------------------------------------------------------------------


STRING = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}}
NONE_ALLOWED = {"logits_processors": [{"name": "none"}]}


class NoneAllowed:
    """A logits processor that masks every token."""

    def __init__(self, arguments: object, prompt_token_ids: object, output_token_ids: object, vocab_size: int) -> None:
        pass

    def __call__(self, output_token_ids: object, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -math.inf)


@pytest.mark.few(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"response_format": STRING, "allowed_token_ids": [0, 1, 2]}, 400, "contradictory_parameters"),
        ({"response_format": STRING, **NONE_ALLOWED}, 400, "contradictory_parameters"),
        (NONE_ALLOWED, 500, "internal_error"),
    ],
)
def test_parameters_without_any_allowed_token_are_client_errors(
    stream: bool, fields: dict[str, Any], status: int, code: str
) -> None:
    """As the fuzzer found: the grammar and the allowed tokens have none in common.

    The operator is at fault if a logits processor masks every token by itself.
    """

    async def test() -> None:
        processors = {"none": "tests.engine.test_extremes:NoneAllowed"}
        async with local_server(engine_options={"logits_processors": processors}) as server:
            answered, sent = await server.post(stream=stream, **fields)
            error = json.loads(sent)["error"]
            assert (answered, error["code"]) == (status, code)
            assert "every token is masked" in error["message"]
            await server.until_idle()

    asyncio.run(test())
