"""A request cut off at any token and continued on another engine ends as if nothing had happened: tokens, log-
probabilities, finish reasons and usage, whatever else the request asks for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine.adapter_table import LoadedAdapter
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import ContinuedChoice, EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.errors import QueueFull, RequestRefused
from manta.cluster.serve.engine.replica_adapters import KEEP_USED_S, ReplicaAdapters
from manta.cluster.serve.engine.step_thread import StepThread
from manta.cluster.serve.requests.prompt_run import Progress
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.structured.constraint import ConstraintLimits, ConstraintSpec, Resolved
from manta.structured.logits_processors import LogitsProcessorSpec
from manta.structured.thinking import ThinkingSection
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import TokenLogprobs
from tests.adapters import adapters_of
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.conftest import PROVE
from tests.loaded_adapters import memory_registries
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("plugin")

NUM_CUTS = 40 if PROVE else 4
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
DRAFTS = {"speculative": SpeculativeConfig(proposers=("ngram", "forced"), ngram_min=1, adaptive=False)}
FORCED = {"speculative": SpeculativeConfig(proposers=("forced",), adaptive=False)}
JSON = ConstraintSpec(kind="json_schema", text=json.dumps(PERSON))
THINKING = ThinkingSection(begin="((", end="))!", end_token_ids=(), is_open=True, budget=7)
"""A section that is open. The tokenizer has no token of its own for its mark."""
AUTOMATON = LogitsProcessorSpec(name="automaton", arguments={"num_states": 97})

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0, "logprobs": 2, "ignore_eos": True}, {}),
    "seeded": ({"seed": 7, "top_p": 0.9, "logprobs": 0, "ignore_eos": True}, {}),
    "unseeded": ({"ignore_eos": True}, {}),
    "choices": ({"seed": 1, "n": 4, "stop_token_ids": tuple(range(5, 60, 2)), "min_tokens": 3}, {}),
    "penalties": (
        {
            "seed": 3,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.3,
            "logit_bias": {9: 4.0, 11: 5.0},
            "bad_words_token_ids": ((9, 11), (30,)),
            "min_tokens": 12,
            "stop_token_ids": (9, 11, 17),
        },
        {},
    ),
    "processors": ({"seed": 4, "n": 2, "logits_processors": (AUTOMATON,), "ignore_eos": True}, {}),
    "schema": ({"seed": 2, "n": 3, "temperature": 1.2, "constraint": JSON, "max_tokens": 60}, {}),
    "thinking": ({"seed": 2, "n": 2, "constraint": JSON, "max_tokens": 60, "thinking": THINKING}, FORCED),
    "schema-forced": ({"seed": 5, "n": 2, "constraint": JSON, "max_tokens": 60}, FORCED),
    "drafts": ({"seed": 8, "n": 2, "allowed_token_ids": (9, 11), "ignore_eos": True}, DRAFTS),
    "recurrent": ({"seed": 8, "n": 2, "ignore_eos": True}, {"family": "lfm2"}),
    "prompt-logprobs": ({"seed": 6, "n": 2, "prompt_logprobs": 1, "logprobs": 1, "ignore_eos": True}, {}),
}
"""Requests, and options of the engine. Prompts take several steps."""


def make_engine(family: str = "llama", **options: Any) -> Engine:
    folder = checkpoint(family, dtype="float32")
    config = EngineConfig(
        model=str(folder),
        kv_cache_bytes=load_model_config(folder).kv_bytes_per_token("float32") * 16 * 128,
        max_num_batched_tokens=16,
        constraints=ConstraintLimits(compile_seconds=PATIENCE_S),
        logits_processors={"automaton": None},
        **options,
    )
    return Engine(config)


@dataclasses.dataclass
class Answer:
    """To one request, over all its attempts."""

    token_ids: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    ends: dict[int, tuple[FinishStatus, int | None]] = dataclasses.field(default_factory=dict)
    usages: dict[int, Usage] = dataclasses.field(default_factory=dict)

    def add(self, output: SequenceOutput) -> None:
        assert output.error is None
        self.token_ids.setdefault(output.index, []).extend(output.token_ids)
        self.logprobs.setdefault(output.index, []).extend(output.logprobs or [])
        self.prompt_logprobs += output.prompt_logprobs or []
        if output.usage is not None:
            before = self.usages.get(output.index)
            if before is not None:
                assert output.usage.num_cached_tokens == before.num_cached_tokens
                assert output.usage.num_accepted_drafts >= before.num_accepted_drafts
                assert output.usage.num_rejected_drafts >= before.num_rejected_drafts
            self.usages[output.index] = output.usage
        if output.finish is not None:
            self.ends[output.index] = output.finish, output.stop_token_id

    def check(self, expected: Answer, has_drafts: bool) -> None:
        assert self.token_ids == expected.token_ids
        assert self.ends == expected.ends
        for index, usage in self.usages.items():
            assert usage.num_output_tokens == len(self.token_ids[index])
            assert (usage.num_accepted_drafts > 0) == has_drafts
        _check_logprobs(self.prompt_logprobs, expected.prompt_logprobs)
        assert self.logprobs.keys() == expected.logprobs.keys()
        for index, logprobs in self.logprobs.items():
            _check_logprobs(logprobs, expected.logprobs[index])


def _check_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [(each.token_id, each.rank) for each in found] == [(each.token_id, each.rank) for each in expected]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)


def run(engine: Engine, request: EngineRequest, answer: Answer, progress: Progress, num_steps: int = 10**9) -> int:
    """Runs a request for so many steps at most; returns how many it took. Nothing of it stays."""
    spec = request.params.constraint
    resolved: Resolved | None = None if spec is None else engine.constraints.resolve(spec).result(PATIENCE_S)
    engine.add_request(request, resolved)
    step = 0
    while engine.has_unfinished and step < num_steps:
        for output in engine.step():
            answer.add(output)
            progress.add(output)
        step += 1
    engine.abort(request.request_id)
    engine.step()
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.grammar_pool.num_sessions == 0
    return step


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_cut_anywhere_ends_unchanged(kind: str) -> None:
    fields, options = KINDS[kind]
    chooser = random.Random(kind)
    prompt = [chooser.randrange(5, VOCAB_SIZE) for _ in range(40)]
    params = SamplingParams(**{"seed": 11, "max_tokens": 30, **fields})
    request = EngineRequest(request_id="whole", prompt_token_ids=prompt, params=params)
    engines = make_engine(**options), make_engine(**options)
    expected = Answer()
    num_steps = run(engines[0], request, expected, Progress(request))
    for cut in range(NUM_CUTS):
        answer, progress, attempt = Answer(), Progress(request), request
        lengths = [chooser.randrange(num_steps) for _ in range(1 + cut % 2)]
        for number, length in enumerate(lengths):
            run(engines[number], attempt, answer, progress, length)
            if progress.has_ended:
                break
            attempt = progress.continuation(f"{cut}/{number}", None)
        if not progress.has_ended:
            run(engines[len(lengths) % 2], attempt, answer, progress)
        answer.check(expected, "speculative" in options)


def test_a_request_with_an_adapter_goes_on_with_the_same_values() -> None:
    adapters = {"moved": adapters_of(checkpoint("llama")).add("moved", 8)}
    engines = make_engine(adapters=adapters), make_engine(adapters=adapters)
    digest = engines[0].model.adapters["moved"].digest
    params = SamplingParams(seed=3, max_tokens=12)
    request = EngineRequest(request_id="whole", prompt_token_ids=[*range(5, 45)], params=params, adapter=digest)
    answers = {name: Answer() for name in ("whole", "plain", "moved")}
    run(engines[0], request, answers["whole"], Progress(request))
    plain = msgspec.structs.replace(request, adapter="")
    run(engines[0], plain, answers["plain"], Progress(plain))
    progress = Progress(request)
    run(engines[0], request, answers["moved"], progress, 4)
    run(engines[1], progress.continuation("moved", None), answers["moved"], progress)
    answers["moved"].check(answers["whole"], False)
    assert answers["plain"].token_ids != answers["whole"].token_ids


class OwnThread:
    """In place of the step thread of an engine, whose steps the test makes itself."""

    def call(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        called: Future[Any] = Future()
        called.set_result(function(*arguments))
        return called


def test_a_request_goes_on_elsewhere_with_values_that_were_replaced(tmp_path: pathlib.Path) -> None:
    """The second engine starts after the folder got others, and forgets the old ones when no stream may need them."""
    adapters = adapters_of(checkpoint("llama"))
    folders = [adapters.add(name, seed) for seed, name in ((8, "old"), (9, "new"))]
    answers = {name: Answer() for name in ("whole", "moved")}
    with memory_registries() as registries:
        registry = registries[str(checkpoint("llama"))]

        def engine_with_adapters() -> tuple[Engine, ReplicaAdapters]:
            engine = make_engine(adapter_roots=(str(tmp_path),))
            return engine, ReplicaAdapters(engine.config, engine, cast(StepThread, OwnThread()), registry)

        def load(loading: ReplicaAdapters, folder: str) -> LoadedAdapter:
            shutil.copytree(folder, tmp_path / "live", dirs_exist_ok=True)
            loaded = asyncio.run(loading.read("live"))
            assert isinstance(loaded, LoadedAdapter)
            assert registry.replace(registry.table.changed({"live": loaded}, time.time(), PATIENCE_S))
            return loaded

        first, of_first = engine_with_adapters()
        old = load(of_first, folders[0])
        params = SamplingParams(seed=3, max_tokens=12)
        request = EngineRequest(request_id="a", prompt_token_ids=[*range(5, 45)], params=params, adapter=old.digest)
        progress = Progress(request)
        run(first, request, answers["whole"], Progress(request))
        run(first, request, answers["moved"], progress, 4)
        new = load(of_first, folders[1])
        second, of_second = engine_with_adapters()
        of_second.start()
        assert [*second.adapters] == [new.digest]
        assert second.adapters.hold(asyncio.run(of_second.find(old.digest)))
        run(second, progress.continuation("b", None), answers["moved"], progress)
        answers["moved"].check(answers["whole"], False)
        registry.table = msgspec.structs.replace(registry.table, replaced={old.digest: time.time() + 1})
        asyncio.run(of_second.catch_up([old.digest]))
        assert registry.table.replaced[old.digest] > time.time() + KEEP_USED_S / 2, "its request may go on elsewhere"
        assert registry.replace(registry.table.changed({"live": new}, time.time() + 2 * KEEP_USED_S, 0))
        asyncio.run(of_second.catch_up())
        assert [*second.adapters] == [new.digest]
        with pytest.raises(RequestRefused) as refused:
            asyncio.run(of_second.find(old.digest))
        assert refused.value.refusal.kind == "adapter_gone"


def test_only_the_first_engine_counts_cached_prompts() -> None:
    engine = make_engine()
    prompt = list(range(5, 69))
    request = EngineRequest(request_id="a", prompt_token_ids=prompt, params=SamplingParams(max_tokens=20, seed=1))
    run(engine, request, Answer(), Progress(request))
    answer, progress = Answer(), Progress(request)
    run(engine, request, answer, progress, 4)
    queries = engine.stats().prefix_cache_queries
    run(engine, progress.continuation("b", None), answer, progress)
    assert answer.usages[0].num_cached_tokens == 48
    assert engine.stats().prefix_cache_queries == queries


def test_a_continuation_ignores_full_queues_not_limits() -> None:
    engine = make_engine(max_model_len=64, max_num_waiting=0, max_num_sequences=1)

    def request(name: str, continued: list[ContinuedChoice] | None) -> EngineRequest:
        params = SamplingParams(seed=1, ignore_eos=True)
        return EngineRequest(request_id=name, prompt_token_ids=[5] * 20, params=params, continued=continued)

    usage = Usage(20, 0, 0)
    for token_ids, kind, value in (([7] * 44, "over_limit", 64), ([7, 10**6], "outside_vocabulary", 10**6)):
        with pytest.raises(RequestRefused) as caught:
            engine.add_request(request("a", [ContinuedChoice(0, token_ids, usage)]))
        assert (caught.value.refusal.kind, caught.value.refusal.value) == (kind, value)
    engine.add_request(request("a", None))
    with pytest.raises(QueueFull):
        engine.add_request(request("b", None))
    engine.add_request(request("c", [ContinuedChoice(0, [7] * 43, usage)]), queue_is_bounded=False)
    ended = {output.request_id: output.usage for _ in range(60) for output in engine.step() if output.finish}
    assert [usage and usage.num_output_tokens for _, usage in sorted(ended.items())] == [44, 44]
