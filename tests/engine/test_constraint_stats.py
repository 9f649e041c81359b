"""What an engine says of its compilers and caches, and what `/metrics` and `/health` make of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from ray.exceptions import RayTaskError

from manta.cluster.engine.request import EngineRequest
from manta.cluster.engine.stats import ConstraintStats, EngineStats
from manta.cluster.errors import GenerationFailed, Unavailable
from manta.cluster.http.endpoints.status import Health, health_of
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.metrics import Metrics, RequestMetrics
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from manta.cluster.serve.channel.token_channel import RequestResult
from manta.cluster.serve.requests.prompt_run import PromptRun
from manta.cluster.serve.requests.submission import Submission
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.compiling.compiler import CompilerBounds, CompilerFailed
from manta.structured.pool_config import GRAMMAR_CACHE_BYTES
from tests.checkpoints import checkpoint
from tests.engine.test_engine import make_engine
from tests.grammar_pools import DEMO
from tests.patience import PATIENCE_S, wait_until


def gauge(text: str, name: str) -> float:
    return float(text.partition(f'\nmanta:constraint_{name}{{model_name="m"}} ')[2].partition("\n")[0])


def test_the_engine_counts_compilers_and_caches() -> None:
    llm = LLM(str(checkpoint("llama", dtype="float32")), grammar_pool={"num_workers": 1})
    assert llm.engine.stats().constraints == ConstraintStats()
    for regex in ("[0-9]{3}", "[a-f]{4}"):
        params = SamplingParams(constraint=ConstraintSpec(kind="regex", text=regex), temperature=0, max_tokens=8)
        llm.generate(["a"], params)
    wait_until(lambda: llm.engine.stats().constraints.num_grammars >= 2)  # counted after the rows are there
    stats = llm.engine.stats()
    found = stats.constraints
    assert (found.num_compilers, found.num_compilers_alive, found.num_cached) == (2, 2, 2)
    assert 0 < found.cached_bytes < found.max_cached_bytes == CompilerBounds().cache_bytes
    assert found.max_grammar_bytes % GRAMMAR_CACHE_BYTES == 0 < found.max_grammar_bytes  # a busy pool adds workers
    assert 60_000 < found.grammar_bytes < found.max_grammar_bytes
    text = Metrics("m").render([stats, stats]).decode()
    for name in msgspec.structs.asdict(found):
        assert gauge(text, name) == 2 * getattr(found, name)


@pytest.fixture(scope="module")
def stats() -> EngineStats:
    return make_engine("llama").stats()


def with_compilers(stats: EngineStats, number: int, alive: int) -> EngineStats:
    return msgspec.structs.replace(stats, constraints=ConstraintStats(num_compilers=number, num_compilers_alive=alive))


def test_health_is_degraded_while_an_engine_cannot_compile(stats: EngineStats) -> None:
    fine, lame, broken = (with_compilers(stats, 2, alive) for alive in (2, 1, 0))
    for engines in ([stats], [fine], [lame], [fine, lame], [fine, msgspec.structs.replace(broken, alive=False)]):
        assert health_of(engines, 30.0) == Health(status="ok")
    for engines in ([broken], [fine, broken]):
        answer = health_of(engines, 30.0)
        assert answer.status == "degraded"
        assert "no grammar compiler" in (answer.reason or "")


def test_health_fails_where_no_engine_steps(stats: EngineStats) -> None:
    with pytest.raises(Unavailable, match=r"^no engine has answered this server yet: Serve starts one$"):
        health_of([], 60.0)
    with pytest.raises(Unavailable, match=r"^no engine answers any more: those that ran have ended, and Serve starts"):
        health_of([], 60.0, knew_engines=True)
    with pytest.raises(Unavailable, match=r"^every engine that answers has failed, and Serve replaces it$"):
        health_of([msgspec.structs.replace(stats, alive=False)], 30.0)
    with pytest.raises(Unavailable, match="no request made progress for 31 s; the bound is 30 s"):
        health_of([msgspec.structs.replace(stats, seconds_since_progress=31.0)], 30.0)


class FailingClient:
    """Of an engine whose calls fail, as Ray tells it."""

    def __init__(self, error: Exception) -> None:
        self.tokenizer = Tokenizer(str(DEMO))
        self.metrics = Metrics("m")
        self.runs: dict[str, PromptRun] = {}
        self.suspects = asyncio.Lock()
        self._error = error

    def note_end(self, request_id: str) -> None:
        pass

    def forget_sent(self, request_id: str) -> None:
        pass

    def measure(self, num_choices: int) -> RequestMetrics:
        return RequestMetrics(self.metrics, num_choices)

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> asyncio.Task[None]:
        return asyncio.ensure_future(run.call(request, pause_s))

    async def generate(self, request: EngineRequest) -> RequestResult:
        raise RayTaskError("generate", "a whole traceback", self._error).as_instanceof_cause()


def test_a_client_reads_the_reason_and_no_traceback() -> None:
    client: Any = FailingClient(CompilerFailed("the grammar compiler does not start"))

    async def read() -> None:
        asked = EngineRequest(request_id="request", prompt_token_ids=[], params=SamplingParams(), deadline_s=PATIENCE_S)
        async for _ in Submission(client, GenerationRequest(prompts=[[5]], engine=asked)):
            pass

    with pytest.raises(GenerationFailed) as caught:
        asyncio.run(read())
    assert caught.value.refusal.kind == "engine_failed"
    assert str(caught.value) == "the engine failed: CompilerFailed: the grammar compiler does not start"
