"""The engine's tokens against transformers' greedy output and against themselves, however the work is cut up."""

from __future__ import annotations

import random

import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine, EngineDead
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.cluster.errors import QueueFull, RequestRefused
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import NATIVE_FAMILIES, VOCAB_SIZE, checkpoint, reference_greedy
from tests.engine_parts import poison_block, worker_of
from tests.pairs import in_turns

LIMITS: dict[str, int] = {}
"""Options of every engine. A worker that compiles programs up to its limits has small ones here."""
NUM_TOKENS = 48
POOL_BLOCKS = 12


def make_prompts(seed: int = 1) -> list[list[int]]:
    """Mixed lengths; the last shares three blocks with the one of 64 tokens."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (3, 17, 40, 64, 9)]
    return [*prompts, [*prompts[3][:48], 7, 8]]


def make_engine(family: str, num_blocks: int | None = None, **options) -> Engine:
    folder = checkpoint(family)
    blocks = num_blocks or 256
    kv_cache_bytes = load_model_config(folder).kv_bytes_per_token("float32") * 16 * blocks
    return Engine(EngineConfig(model=str(folder), kv_cache_bytes=kv_cache_bytes, **{**LIMITS, **options}))


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Output token ids of each prompt; every sequence must end well and the pool be whole afterwards."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=one))
    outputs: list[list[int]] = [[] for _ in prompts]
    for delta in drain(engine):
        assert delta.error is None
        outputs[int(delta.request_id)] += delta.token_ids
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return outputs


def drain(engine: Engine) -> list[SequenceOutput]:
    deltas: list[SequenceOutput] = []
    while engine.has_unfinished:
        deltas += engine.step()
    engine.step()  # an idle step checks the books
    return deltas


GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


HISTORIES: dict[str, dict] = {
    "chunked": {"max_num_batched_tokens": 7},
    "batched": {},
    "preempted": {"num_blocks": POOL_BLOCKS},
    "all at once": {"num_blocks": POOL_BLOCKS, "max_num_batched_tokens": 11, "max_num_sequences": 5},
}
"""Options under which prompts are computed whole or cut, and sequences preempted."""


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "history"), in_turns(NATIVE_FAMILIES, list(HISTORIES)))
def test_greedy_tokens_equal_transformers(family: str, history: str) -> None:
    prompts, options = make_prompts(), HISTORIES[history]
    expected = [reference_greedy(checkpoint(family), prompt, NUM_TOKENS) for prompt in prompts]
    engine = make_engine(family, **options)
    assert run(engine, prompts, GREEDY) == expected
    stats = engine.stats()
    gives_back = engine.model.groups[0].window is not None
    if not (gives_back and "num_blocks" in options):  # a tiny pool evicts first what left the window
        assert stats.prefix_cache_hits > 0, "the shared prefix was not found in the cache"
    assert bool(stats.num_preemptions) == ("num_blocks" in options)
    hits = stats.prefix_cache_hits
    assert run(engine, prompts, GREEDY) == expected, "a warm prefix cache changed the tokens"
    if "num_blocks" not in options:
        assert engine.stats().prefix_cache_hits > hits + 64


def test_seeded_tokens_do_not_depend_on_batch() -> None:
    prompts = make_prompts()
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=40, ignore_eos=True, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=8, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=-3, max_tokens=40, ignore_eos=True),
    ]
    others = [make_prompts(seed)[seed % 5] for seed in range(2, 17)]
    for index, one in enumerate(params):
        prompt = prompts[index + 1]
        alone = run(make_engine("llama"), [prompt], one)[0]
        assert len(set(alone)) > 10
        crowd = [SamplingParams(temperature=1, seed=100 + i, max_tokens=30, ignore_eos=True) for i in range(15)]
        assert run(make_engine("llama"), [prompt, *others], [one, *crowd])[0] == alone
        engine = make_engine("llama", num_blocks=POOL_BLOCKS)
        for i, other in enumerate(others[:6]):
            engine.add_request(
                EngineRequest(request_id=f"urgent-{i}", prompt_token_ids=other, params=crowd[i], priority=-1)
            )
        engine.add_request(EngineRequest(request_id="late", prompt_token_ids=prompt, params=one))
        tokens = [token for delta in drain(engine) if delta.request_id == "late" for token in delta.token_ids]
        assert tokens == alone
        assert engine.stats().num_preemptions > 0


def test_stop_tokens_eos_and_min_tokens_end_sequences() -> None:
    prompt = make_prompts()[1]
    free = run(make_engine("llama"), [prompt], GREEDY)[0]
    stop = free[5]
    engine = make_engine("llama")
    engine.add_request(
        EngineRequest(
            request_id="a",
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(stop,)),
        )
    )
    deltas = drain(engine)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == free[: free.index(stop) + 1]
    assert deltas[-1].finish is FinishStatus.FINISHED_STOPPED
    assert deltas[-1].stop_token_id == stop
    assert deltas[-1].usage.num_output_tokens == len(tokens)
    later = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(stop,), min_tokens=20)
    masked = run(make_engine("llama"), [prompt], later)[0]
    assert stop not in masked[:20]
    assert len(masked) >= 20


def test_a_nan_row_ends_alone_without_its_blocks() -> None:
    prompts = make_prompts()
    expected = run(make_engine("llama"), prompts, GREEDY)
    engine = make_engine("llama")
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=GREEDY))
    outputs: list[list[int]] = [[] for _ in prompts]
    failed = None
    for number in range(200):
        if number == 6:  # poison one block of sequence 1 in the KV cache
            block = engine.scheduler.running[1].block_tables[0][0]
            poison_block(engine, block)
        for delta in engine.step():
            outputs[int(delta.request_id)] += delta.token_ids
            if delta.finish is FinishStatus.FINISHED_INTERNAL_ERROR:
                failed = delta
        if not engine.has_unfinished:
            break
    assert failed is not None
    assert failed.request_id == "1"
    assert "NaN" in failed.error
    assert [outputs[i] for i in (0, 2, 3, 4, 5)] == [expected[i] for i in (0, 2, 3, 4, 5)]
    assert run(engine, prompts, GREEDY) == expected, "a poisoned block was read again"


def test_a_failed_step_is_recomputed_once_then_unhealthy() -> None:
    prompts = make_prompts()
    expected = run(make_engine("llama"), prompts, GREEDY)
    engine = make_engine("llama")
    runner = worker_of(engine).runner
    forward, failures = runner.model.forward, [4]

    def fail_once(*arguments):
        failures[0] -= 1
        if failures[0] == 0:
            raise RuntimeError("the device went away")
        return forward(*arguments)

    runner.model.forward = fail_once
    assert run(engine, prompts, GREEDY) == expected

    def fail_always(*arguments):
        raise RuntimeError("the device went away")

    runner.model.forward = fail_always
    engine.add_request(EngineRequest(request_id="x", prompt_token_ids=prompts[0], params=GREEDY))
    engine.step()
    with pytest.raises(EngineDead, match="the device went away"):
        engine.step()
    with pytest.raises(EngineDead):
        engine.add_request(EngineRequest(request_id="y", prompt_token_ids=prompts[0], params=GREEDY))


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "field", "value"),
    [
        ([], GREEDY, "empty", "prompt", None),
        ([5, VOCAB_SIZE], GREEDY, "outside_vocabulary", "prompt", VOCAB_SIZE),
        ([5, -1], GREEDY, "outside_vocabulary", "prompt", -1),
        ([5] * 5000, GREEDY, "context_length", "prompt", 5000),
        ([5] * 10, SamplingParams(max_tokens=100_000), "exceeds", "max_tokens", 100_000),
        ([5] * 10, SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "outside_vocabulary", "logit_bias", VOCAB_SIZE),
    ],
)
def test_unservable_requests_are_refused_at_once(prompt, params, kind, field, value) -> None:
    engine = make_engine("llama")
    with pytest.raises(RequestRefused) as caught:
        engine.add_request(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params))
    refusal = caught.value.refusal
    assert (refusal.kind, refusal.field, refusal.value) == (kind, field, value)
    assert not engine.has_unfinished


def test_full_queues_deadlines_and_aborts_free_everything() -> None:
    engine = make_engine("llama", max_num_sequences=1, max_num_waiting=1)
    prompt = make_prompts()[0]
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=prompt, params=GREEDY))
    engine.step()
    engine.add_request(EngineRequest(request_id="b", prompt_token_ids=prompt, params=GREEDY, deadline_s=1e-9))
    with pytest.raises(QueueFull, match="max_num_waiting"):
        engine.add_request(EngineRequest(request_id="c", prompt_token_ids=prompt, params=GREEDY))
    expired = engine.step()
    assert [(delta.request_id, delta.finish) for delta in expired if delta.finish] == [
        ("b", FinishStatus.FINISHED_ABORTED)
    ]
    assert [delta.finish for delta in engine.abort("a")] == [FinishStatus.FINISHED_ABORTED]
    assert engine.abort("a") == []
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_logprobs_equal_the_reference() -> None:
    import torch

    from tests.checkpoints import reference_logits

    prompt = make_prompts()[3]
    engine = make_engine("llama", max_num_batched_tokens=13)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params))
    deltas = drain(engine)
    tokens = [token for delta in deltas for token in delta.token_ids]
    reported = [entry for delta in deltas for entry in (delta.logprobs or [])]
    prompt_reported = [entry for delta in deltas for entry in (delta.prompt_logprobs or [])]
    assert [entry.token_id for entry in prompt_reported] == prompt[1:]
    assert [entry.token_id for entry in reported] == tokens
    reference = torch.log_softmax(reference_logits(checkpoint("llama"), prompt + tokens).float(), dim=-1)
    for position, entry in enumerate([*prompt_reported, *reported]):
        row = reference[position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        top = torch.topk(row, len(entry.top_token_ids))
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-3)


def test_text_only_parameters_are_not_sent_to_ranks() -> None:
    engine = make_engine("llama")
    params = SamplingParams(
        temperature=0, max_tokens=2, stop=("x" * 100,), bad_words=("y",), bad_words_token_ids=((9,),), top_k=5
    )
    engine.add_request(EngineRequest(request_id="0", prompt_token_ids=[5, 6], params=params))
    engine.step()
    (state,) = worker_of(engine).sequences.sampling.sequences.values()
    assert state.params == SamplingParams(temperature=0, max_tokens=2, bad_words_token_ids=((9,),), top_k=5)
    drain(engine)
