"""After its start a worker compiles nothing, its KV cache stays where it is, and a second start loads what was kept."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import pytest

from manta.cluster.llm import LLM, ConstraintSpec, LogitsProcessorSpec, SamplingParams
from manta.workers.jax_worker.batch import size_for, sizes_up_to
from manta.workers.jax_worker.jax_worker import JaxWorker
from manta.workers.jax_worker.programs import jitted
from manta.workers.model_options import ModelOptions
from manta.workers.step import StepInput
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.conftest import PROVE
from tests.engine_parts import worker_of

NUM_STEPS = 10_000 if PROVE else 100
"""Steps of random traffic, in a batch of eight sequences."""


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The names of JAX's events of compilation, as they happen. Nothing is kept of workers of earlier tests."""
    jitted.cache_clear()
    events: list[str] = []

    def note(event: str, duration: float, **details: Any) -> None:
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


class Shift:
    """A logits processor that prefers one token."""

    def __init__(self, arguments: dict[str, Any], prompt: Any, output: Any, vocab_size: int) -> None:
        self.token_id = arguments["token_id"]

    def __call__(self, output: Any, logits: Any) -> None:
        logits[self.token_id] += 1.0


def random_request(chooser: random.Random) -> tuple[list[int], SamplingParams]:
    prompt = [chooser.randrange(5, VOCAB_SIZE) for _ in range(chooser.choice([1, 3, 9, 40, 90]))]
    options: dict[str, Any] = {"max_tokens": chooser.randrange(1, 16), "temperature": chooser.choice([0.0, 0.7, 1.0])}
    options["n"] = chooser.choice([1, 1, 2, 5])
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.1, "presence_penalty": 0.4, "bad_words_token_ids": ((7,), (8, 9))},
        {"logprobs": 5, "prompt_logprobs": 2},
        {"constraint": ConstraintSpec(kind="regex", text="[a-z]{1,40}")},
        {"allowed_token_ids": tuple(range(30, 60)), "logit_bias": {31: 5.0}, "min_tokens": 1},
        {"logits_processors": (LogitsProcessorSpec(name="shift", arguments={"token_id": 44}),)},
    ]
    return prompt, SamplingParams(**{**options, **chooser.choice(kinds)})


@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param(None, marks=pytest.mark.prove, id="plain"),
        pytest.param({"proposers": ["ngram"], "max_draft_tokens": 3}, id="drafts"),
    ],
)
def test_nothing_compiles_after_the_start(compilations: list[str], speculative: dict[str, Any] | None) -> None:
    chooser = random.Random(1)
    options: dict[str, Any] = {} if speculative is None else {"speculative": speculative}
    llm = LLM(
        str(checkpoint("llama")),
        device="tpu",
        dtype="float32",
        max_num_sequences=8,
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 20,
        **options,
    )
    llm.register_logits_processor("shift", Shift)
    assert compilations
    compilations.clear()
    runner, steps = worker_of(llm.engine).runner, []
    execute = runner.execute

    def counted(step: StepInput) -> None:
        steps.append(step.num_tokens)
        execute(step)

    runner.execute = counted
    while len(steps) < NUM_STEPS:
        requests = [random_request(chooser) for _ in range(20)]
        llm.generate([prompt for prompt, _ in requests], [each for _, each in requests])
    assert not compilations
    assert len({size_for(count, sizes_up_to(64)) for count in steps if count}) == len(sizes_up_to(64))


@pytest.mark.prove
def test_a_second_equal_worker_compiles_nothing(compilations: list[str]) -> None:
    options = ModelOptions(
        model=str(checkpoint("llama")), device="tpu", dtype="float32", max_num_sequences=8, max_num_batched_tokens=16,
        kv_cache_bytes=1 << 20,
    )  # fmt: skip
    JaxWorker(options)
    assert compilations
    compilations.clear()
    JaxWorker(options)
    assert not compilations
    JaxWorker(msgspec.structs.replace(options, max_num_sequences=16))
    assert compilations


def test_the_cache_is_updated_in_place() -> None:
    llm = LLM(str(checkpoint("llama")), device="tpu", dtype="float32", max_num_sequences=8, max_num_batched_tokens=16)
    executor: Any = llm.engine.executor
    model = executor.worker.runner.model
    before = [pages.unsafe_buffer_pointer() for pages in model.pages]
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert [pages.unsafe_buffer_pointer() for pages in model.pages] == before


@pytest.mark.prove
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if PROVE else ["bfloat16"])
def test_a_steps_memory_does_not_grow_with_cache(dtype: str) -> None:
    sizes = []
    for num_bytes in (1 << 18, 1 << 22):
        options = ModelOptions(
            model=str(checkpoint("llama")), device="tpu", dtype=dtype, max_num_sequences=8, max_num_batched_tokens=16,
            kv_cache_bytes=num_bytes,
        )  # fmt: skip
        program: Any = JaxWorker(options).runner.model.programs.forward[16]
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= sizes[0] + (1 << 16)


def test_a_failed_step_that_deleted_caches_is_survived() -> None:
    llm = LLM(str(checkpoint("llama")), device="tpu", dtype="float32", max_num_sequences=8, max_num_batched_tokens=16)
    executor: Any = llm.engine.executor
    model = executor.worker.runner.model
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids
    program, failures = model.programs.forward[8], []

    def fail_once(*arguments: Any) -> Any:
        if not failures:
            failures.append(program(*arguments))
            raise RuntimeError("the device failed after it had taken the cache")
        return program(*arguments)

    model.programs.forward[8] = fail_once
    assert llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids == expected
    assert failures


def test_sizes_double_up_to_the_limit() -> None:
    assert sizes_up_to(1) == [8]
    assert sizes_up_to(64) == [8, 16, 32, 64]
    assert sizes_up_to(256, growth=4) == [8, 32, 128, 256]
    assert sizes_up_to(100) == [8, 16, 32, 64, 104]
    assert size_for(9, [8, 16, 32]) == 16


def test_only_the_jax_worker_imports_jax() -> None:
    code = "import sys, manta.workers.jax_worker.jax_worker; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
