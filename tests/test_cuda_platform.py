"""The engine over the CUDA platform gives the CPU's tokens: in Triton's interpreter, or on a GPU (`make gpu-check`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from cluster.llm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, checkpoint, reference_greedy
from tests.triton_device import DEVICE, NEEDS_GPU, THOROUGH
from workers import worker
from workers.kernels.triton import graphs, launch
from workers.platforms.cuda import CudaPlatform

NUM_TOKENS = 12 if THOROUGH else 3


def make_llm(monkeypatch: pytest.MonkeyPatch, model: str, **options: Any) -> LLM:
    """Over the CUDA platform, on whichever device Triton's kernels run here."""
    with monkeypatch.context() as patch:
        patch.setattr(worker, "choose_platform", lambda device, num_threads: CudaPlatform(DEVICE))
        limits = {"kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 32, "max_model_len": 96, "max_num_sequences": 2}
        llm = LLM(model, **limits | options)
    assert llm.engine.model.platform == "cuda"
    return llm


def test_a_decode_step_is_padded_to_the_next_size_that_is_captured() -> None:
    sizes = graphs.graph_sizes(200)
    assert sizes == (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 200)
    assert graphs.graph_sizes(1) == (1,)
    assert graphs.graph_sizes(4096)[-1] == graphs.MOST_SEQUENCES
    assert [graphs.padded_to(sizes, np.ones(count)) for count in (1, 3, 17, 200, 201)] == [1, 4, 32, 200, 0]
    assert graphs.padded_to(sizes, np.array([1, 2])) == 0
    assert graphs.padded_to((), np.ones(1)) == 0


@pytest.mark.parametrize("family", ["qwen3", "mistral"] if THOROUGH else ["qwen3"])
def test_tokens_are_those_of_transformers_and_of_the_cpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(family) if THOROUGH else checkpoint(family, num_hidden_layers=1)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in (5, 37 if THOROUGH else 20)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    filters = {"top_k": 20, "top_p": 0.9} if THOROUGH else {}
    drawn = SamplingParams(
        seed=1, repetition_penalty=1.2, max_tokens=NUM_TOKENS, prompt_logprobs=1, ignore_eos=True, **filters
    )
    asked = [*prompts, prompts[0]], [greedy, greedy, drawn]
    replayed = []
    capture = launch.capture

    def counted(*arguments: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        result, replay = capture(*arguments)
        return result, lambda: (replayed.append(1), replay())

    monkeypatch.setattr(launch, "capture", counted)
    outputs = make_llm(monkeypatch, str(folder)).generate(*asked, use_tqdm=False)
    assert len(replayed) >= NUM_TOKENS - 1
    on_cpu = LLM(str(folder), device="cpu", kv_cache_bytes=1 << 22).generate(*asked, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=False):
        assert output.outputs[0].token_ids == reference_greedy(folder, prompt, NUM_TOKENS)
    assert outputs[2].outputs[0].token_ids == on_cpu[2].outputs[0].token_ids
    assert outputs[2].prompt_logprobs is not None
    for own, other in zip(outputs[2].prompt_logprobs[1:], on_cpu[2].prompt_logprobs[1:], strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-3)


@NEEDS_GPU
def test_the_demo_model_is_greedy_equal_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with every kind of batch: chunked prompts, shared prefixes, and decodes beside them."""
    conversations = [
        [{"role": "user", "content": text}] for text in ("What is Manta?", "What can you do?", "Hello")
    ] * 4
    params = SamplingParams(temperature=0, max_tokens=100)
    llm = make_llm(monkeypatch, "demo", dtype="float32", max_model_len=None, kv_cache_bytes=1 << 26)
    on_cpu = LLM("demo", device="cpu", dtype="float32")
    texts = [
        [output.outputs[0].text for output in each.chat(conversations, params, use_tqdm=False)]
        for each in (llm, on_cpu)
    ]
    assert texts[0] == texts[1]


@NEEDS_GPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kv_cache_fills_what_a_step_leaves_free(dtype: str) -> None:
    llm = LLM("demo", device="cuda", dtype=dtype, kv_cache_fraction=0.5)
    assert llm.engine.model.kv_cache_bytes > 0.3 * torch.cuda.get_device_properties(0).total_memory


def test_an_older_gpu_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CudaPlatform(DEVICE)
    assert platform.resolve_dtype("auto", "float16") == "bfloat16"
    assert platform.resolve_dtype("auto", "float32") == "float32"
    monkeypatch.setattr(launch, "has_bfloat16", lambda device: False)
    assert platform.resolve_dtype("auto", "bfloat16") == "float32"
    with pytest.raises(ValueError, match=r"capability 8\.0 or higher; set dtype to float32"):
        platform.resolve_dtype("bfloat16", "bfloat16")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_on_cuda_claims_a_gpu_of_ray(num_ranks: int) -> None:
    """One for itself, or one for each rank, whose placement group claims it."""
    pytest.importorskip("ray")
    from cluster.config import EngineConfig
    from cluster.serve.engine_deployment import engine_deployment

    for device, expected in (("cuda", 1 if num_ranks == 1 else 0), ("auto", 0)):
        config = EngineConfig(device=device, tensor_parallel_size=num_ranks, num_threads=1)
        assert engine_deployment(config, 1).ray_actor_options["num_gpus"] == expected


def test_an_engine_of_one_rank_needs_no_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"  # importing it raises ImportError
        "from cluster.llm import LLM, SamplingParams\n"
        "(output,) = LLM('demo', device='cpu').generate([5, 6, 7], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "assert len(output.outputs[0].token_ids) > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU on this machine")
def test_gpu_check_says_in_one_sentence_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) != 0
    captured = capsys.readouterr()
    assert "no CUDA GPU" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
