"""The offline `LLM`: text in and out, stepping by hand, streams, and errors that name what is wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import transformers

from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import QueueFull, RequestRefused
from manta.cluster.llm import LLM, SamplingParams
from tests.checkpoints import checkpoint, reference_greedy

PROMPTS = ["The quick brown fox", "Hello", "naïve café, 3 < 4"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(checkpoint("llama")), kv_cache_bytes=2**22)


@pytest.fixture(scope="module")
def reference_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(checkpoint("llama"))


def test_text_and_tokens_equal_transformers(llm, reference_tokenizer) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = reference_tokenizer(prompt).input_ids
        assert output.prompt_token_ids == ids
        choice = output.outputs[0]
        assert choice.token_ids == reference_greedy(checkpoint("llama"), ids, 24)
        assert choice.text == reference_tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert choice.finish_reason is FinishStatus.FINISHED_LENGTH
        assert output.finished
        assert (output.usage.num_prompt_tokens, output.usage.num_output_tokens) == (len(ids), 24)


def test_a_prompt_may_be_token_ids(llm) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    single = llm.generate(ids, GREEDY, use_tqdm=False)
    pair = llm.generate([ids, ids], [GREEDY, SamplingParams(temperature=0, max_tokens=3)], use_tqdm=False)
    assert len(single) == 1
    assert pair[0].outputs[0].token_ids == single[0].outputs[0].token_ids
    assert len(pair[1].outputs[0].token_ids) <= 3


def test_a_stop_string_ends_text_and_kept_tokens(llm) -> None:
    free = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.text[10:13]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    choice = output.outputs[0]
    assert choice.text == free.text[: free.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == (FinishStatus.FINISHED_STOPPED, stop)
    assert output.usage.num_output_tokens == len(choice.token_ids)
    assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks


def test_stepping_by_hand_and_abort_work(llm) -> None:
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for index, prompt in enumerate(PROMPTS):
        llm.add_request(f"hand-{index}", prompt, GREEDY)
    with pytest.raises(RequestRefused, match="hand-0"):
        llm.add_request("hand-0", "again", GREEDY)
    llm.add_request("gone", "Hello", GREEDY)
    finished = {}
    llm.step()
    llm.abort("gone")
    while llm.engine.has_unfinished:
        finished |= {output.request_id: output for output in llm.step() if output.finished}
    assert [finished[f"hand-{i}"].outputs[0].text for i in range(3)] == [one.outputs[0].text for one in expected]
    assert "gone" not in finished


def test_leaving_one_of_several_streams_aborts_it(llm) -> None:
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    async def read(prompt: str) -> list[str]:
        return [output.outputs[0].text async for output in llm.stream(prompt, GREEDY)]

    async def leave() -> None:
        stream = llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

    async def main() -> list[list[str]]:
        *texts, _ = await asyncio.gather(*map(read, PROMPTS), leave())
        with pytest.raises(RequestRefused, match="max_tokens"):
            await read_refused()
        return texts

    async def read_refused() -> None:
        async for _ in llm.stream("Hello", SamplingParams(max_tokens=10**6)):
            pass

    for pieces, text in zip(asyncio.run(main()), expected, strict=True):
        assert pieces[-1] == text
        assert all(text.startswith(piece) for piece in pieces)
        assert len(set(pieces)) > 3
    assert not llm.engine.has_unfinished


def test_a_batch_may_be_longer_than_the_queue() -> None:
    """The queue's limit is for clients that can come back later; a batch has no such client."""
    llm = LLM(str(checkpoint("llama")), kv_cache_bytes=2**22, max_num_sequences=2, max_num_waiting=3)
    outputs = llm.generate([[5]] * 10, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
    for index in range(5):
        llm.add_request(str(index), [5], GREEDY)
    with pytest.raises(QueueFull, match="max_num_waiting"):
        llm.add_request("one more", [5], GREEDY)


def test_a_refused_prompt_refuses_the_whole_batch(llm) -> None:
    with pytest.raises(RequestRefused, match="outside the vocabulary"):
        llm.generate([[5, 6], [10**6]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("options", "words"),
    [({"blocksize": 16}, "blocksize"), ({"block_size": 7}, "7"), ({"max_model_len": 10**9}, "max_model_len")],
)
def test_a_wrong_option_is_named(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(str(checkpoint("llama")), **options)


def test_the_driver_side_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, manta.cluster.engine.scheduler, manta.cluster.engine.request, manta.cluster.config\n"
        "import manta.workers.step, manta.workers.sampling_params\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
