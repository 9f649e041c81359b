"""The engine over the CUDA platform gives the CPU's tokens: in Triton's interpreter, or on a GPU (`make gpu-check`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import pathlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import DecodeLimits, KVCaches
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.triton import graphs, launch
from manta.workers.kernels.triton.metadata import DeviceMetadata, Layout, build_metadata
from manta.workers.kernels.triton.work import WorkShape
from manta.workers.model_options import ModelOptions
from manta.workers.parallel.group import CollectiveGroup, GlooGroup, open_store
from manta.workers.platforms import cuda
from manta.workers.platforms.cuda import CudaPlatform
from manta.workers.ranks.rank_worker import RankPlace
from manta.workers.step import SamplePoint, ScheduledSequence, SequenceStart, StepInput
from manta.workers.torch_worker import torch_worker
from manta.workers.torch_worker.loader import load_model
from tests.checkpoints import VOCAB_SIZE, checkpoint, reference_greedy
from tests.eagle3_heads import Eagle3Formula, eagle3_folder
from tests.engine_parts import device_of
from tests.patience import PATIENCE_S
from tests.specdecode.test_draft_heads import drafts_of
from tests.workers.test_layer_kinds import folder_of
from tests.workers.triton_device import DEVICE, NEEDS_GPU, THOROUGH

NUM_TOKENS = 12 if THOROUGH else 3


def make_llm(monkeypatch: pytest.MonkeyPatch, model: str, mixed_tokens: int = 12, **options: Any) -> LLM:
    """Over the CUDA platform, on whichever device Triton's kernels run here. In the interpreter, which takes its time
    for rows that pad, steps that also compute prompts are captured for so many tokens, and larger ones are not warmed.
    """
    with monkeypatch.context() as patch:
        patch.setattr(torch_worker, "choose_platform", lambda *arguments: CudaPlatform(DEVICE))
        if not THOROUGH:
            patch.setattr(graphs, "MIXED_TOKENS", (mixed_tokens,))
            patch.setattr(graphs, "prompt_sizes", lambda max_num_tokens: ())
        limits = {"kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 32, "max_model_len": 96, "max_num_sequences": 2}
        llm = LLM(model, **limits | options)
    assert llm.engine.model.platform == "cuda"
    return llm


def decodes(*sizes: int) -> tuple[Layout, ...]:
    return tuple(Layout(1, size) for size in sizes)


def test_a_decode_step_is_padded_to_captured_sizes() -> None:
    layouts = graphs.layouts_to_capture(200)
    assert layouts == decodes(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 200)
    assert graphs.layouts_to_capture(1) == decodes(1)
    assert graphs.layouts_to_capture(4096)[-1] == Layout(1, graphs.MOST_SEQUENCES)
    sizes = [graphs.padded_to(layouts, np.ones(count)) for count in (1, 3, 17, 200, 201)]
    assert sizes == [*decodes(1, 4, 32, 200), None]
    assert graphs.padded_to(layouts, np.array([1, 2])) is None
    assert graphs.padded_to(layouts, np.array([], dtype=np.int64)) is None
    assert graphs.padded_to((), np.ones(1)) is None


def test_a_prompt_step_is_padded_to_captured_sizes() -> None:
    layouts = graphs.layouts_to_capture(200, 8, max_num_tokens=200)
    sizes = [Layout(tokens, 200, tokens) for tokens in (64, 128, 192, 256)]
    assert layouts == (*graphs.layouts_to_capture(200, 8), *sizes)
    assert graphs.padded_to(layouts, np.array([60, 1, 1])) == sizes[0]
    assert graphs.padded_to(layouts, np.array([60, 1, 1, 30, 60])) == sizes[2]
    assert graphs.padded_to(layouts, np.array([250, 9])) is None
    assert graphs.padded_to(layouts, np.array([9])) == Layout(9, 1)


def test_a_verification_step_is_padded_per_sequence() -> None:
    layouts = graphs.layouts_to_capture(200, max_draft_tokens=8)
    assert layouts[-4:] == (Layout(9, 1), Layout(9, 2), Layout(9, 4), Layout(9, 8))
    assert layouts[:-4] == graphs.layouts_to_capture(200)
    assert graphs.padded_to(layouts, np.ones(1)) == Layout(1, 1)
    assert graphs.padded_to(layouts, np.array([1, 9, 3])) == Layout(9, 4)
    assert graphs.padded_to(layouts, np.array([2] * 8)) == Layout(9, 8)
    assert graphs.padded_to(layouts, np.array([2] * 9)) is None
    assert graphs.padded_to(layouts, np.array([10])) is None


SHAPE = WorkShape(16, 8)


class NoLayers:
    """A model whose layers do nothing, and which steps were captured."""

    def __init__(self) -> None:
        self.layers = graphs.GraphedLayers(lambda residual, *rest: residual + 1)
        self.captured: list[tuple[Layout, bool]] = []
        self._caches: KVCaches = []

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        assert isinstance(metadata, DeviceMetadata)
        if metadata.layout is not None:
            self.captured.append((metadata.layout, metadata.prefix_rows is not None))
        return self.layers(torch.zeros(len(token_ids), 4), torch.empty(0), metadata, self._caches)


def test_large_batches_are_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (one, two, four), verify = NoLayers(), decodes(1, 2, 4), Layout(3, 2)
    mixed = Layout(64, 4, 64)
    layouts, device = (one, two, four, verify, mixed), torch.device("cpu")
    record = functools.partial(graphs.record, model.layers, model.forward, layouts, shape=SHAPE, device=device)
    limits = DecodeLimits(4, 64, 8)
    assert record(limits) == layouts
    # Each is run once without sums over ranks before it is captured
    twice = [each for each in (four, two, one, verify, mixed) for _ in range(2)]
    both = [(each, has_groups) for each in twice for has_groups in (False, True)]
    assert model.captured == [each for each in both if each != (one, True)]  # one sequence is no group
    model.captured.clear()
    assert record(limits._replace(shares_prefixes=False)) == layouts
    assert model.captured == [(each, False) for each in twice]
    clock = iter([0.0, 0.0, graphs.MOST_SECONDS, graphs.MOST_SECONDS + 1])
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: next(clock))
    assert record(limits) == (two, four)
    assert graphs.padded_to((two, four), np.ones(1)) == two


def test_attention_over_prompts_is_compiled_before_any_comes() -> None:
    """With groups and without."""
    steps: list[tuple[int, int, bool]] = []

    def forward(token_ids: torch.Tensor, metadata: AttentionMetadata) -> None:
        assert isinstance(metadata, DeviceMetadata)
        assert metadata.layout is None
        assert len(token_ids) == metadata.num_tokens == 2 * metadata.num_sequences
        steps.append((metadata.max_query_len, metadata.num_sequences, metadata.prefix_rows is not None))

    device = torch.device("cpu")
    graphs.compile_prompts(forward, DecodeLimits(1000, 64, 8), SHAPE, device)
    assert steps == [(2, 2, False), (2, 2, True)]
    steps.clear()
    graphs.compile_prompts(forward, DecodeLimits(1, 64, 8), SHAPE, device)
    graphs.compile_prompts(forward, DecodeLimits(2, 64, 8, shares_prefixes=False), SHAPE, device)
    assert steps == [(2, 1, False), (2, 2, False)]


def test_products_of_experts_are_compiled_for_prompts_of_every_size() -> None:
    sizes: list[int] = []
    limits = DecodeLimits(1, 4096, 8, max_num_tokens=3000)
    device = torch.device("cpu")
    graphs.compile_prompts(lambda tokens, step: sizes.append(len(tokens)), limits, SHAPE, device, has_experts=True)
    assert sizes == [1024, 2048, 3000, 2]


def test_ranks_keep_what_all_have_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In threads: the second rank cannot run one layout, so that neither keeps it; both go on with smaller ones. The
    first does not take part in sums over ranks for which it would wait in vain.
    """
    said, barrier = [0, 0], threading.Barrier(2, timeout=PATIENCE_S)

    def run(rank: int) -> tuple[tuple[Layout, ...], int, list[Layout]]:
        model = NoLayers()
        is_alone, sums = [False], []

        @contextlib.contextmanager
        def alone() -> Iterator[None]:
            is_alone[0] = True
            yield
            is_alone[0] = False

        def agree(value: int) -> int:
            said[rank] = value
            barrier.wait()
            least = min(said)
            barrier.wait()
            return least

        def forward(token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            assert isinstance(metadata, DeviceMetadata)
            if rank == 1 and metadata.layout == Layout(1, 2):
                raise RuntimeError("operation not permitted when stream is capturing")
            if not is_alone[0] and metadata.layout is not None:
                sums.append(metadata.layout)
            return model.forward(token_ids, metadata)

        limits = DecodeLimits(8, 64, 8, shares_prefixes=False)
        layouts, device = decodes(1, 2, 4, 8), torch.device("cpu")
        captured = graphs.record(model.layers, forward, layouts, limits, SHAPE, device, agree, alone)
        return captured, len(model.layers._graphs), sums

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(decodes(1, 4, 8), 3, [*decodes(8, 4, 1)])] * 2
    assert caplog.text.count("kernel by kernel") == 1


def test_uncapturable_steps_run_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    def forward(token_ids: torch.Tensor, metadata: DeviceMetadata, *caches: object) -> torch.Tensor:
        if metadata.layout is None:
            return model.forward(token_ids, metadata)
        raise RuntimeError("operation not permitted when stream is capturing")

    platform, model = CudaPlatform(torch.device("cpu")), NoLayers()
    refused = SimpleNamespace(compiled=model.layers, forward=forward)
    platform.record_decodes(refused, [], DecodeLimits(2, 64, 8))  # type: ignore[arg-type]
    assert platform.graph_layouts == ()
    assert "kernel by kernel" in caplog.text
    metadata = platform.build_metadata(
        QueryTokens(np.array([3]), np.ones(1, dtype=np.int64), np.zeros((1, 1), np.int32), 8)
    )
    assert model.forward(torch.zeros(1, dtype=torch.int64), metadata).tolist() == [[1.0] * 4]


def test_a_lone_measured_rank_replays_no_sums() -> None:
    platform = CudaPlatform(torch.device("cpu"))
    platform.graph_layouts = decodes(1)
    tokens = QueryTokens(np.array([3]), np.ones(1, dtype=np.int64), np.zeros((1, 1), np.int32), 8)
    group = CollectiveGroup(0, 2, distributed.HashStore(), None, torch.device("cpu"))
    platform._group = group  # type: ignore[assignment]
    assert platform.build_metadata(tokens).layout == Layout(1, 1)
    with group.alone():
        assert platform.build_metadata(tokens).layout is None


@pytest.mark.parametrize(("family", "count"), [("qwen2", 1), ("llama", 2)])
def test_a_tied_head_shares_its_embeddings_tensor(family: str, count: int) -> None:
    sizes = []

    class Counting(CudaPlatform):
        def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            sizes.append(view.numel())
            return super().place_weight(view, dtype)

        place_embedding = place_weight

    folder = checkpoint(family, num_hidden_layers=1)
    config = load_model_config(folder)
    assert config.tie_word_embeddings == (count == 1)
    model = load_model(folder, config, "float32", Counting(DEVICE))
    assert sizes.count(config.vocab_size * config.hidden_size) == count
    assert model.compute_logits(torch.zeros(2, config.hidden_size, device=DEVICE)).shape == (2, config.vocab_size)


@pytest.mark.parametrize("num_sequences", range(1, 6))
@pytest.mark.parametrize("layout", [None, Layout(1, 7), Layout(3, 7)])
def test_step_arrays_are_aligned_to_16_bytes(num_sequences: int, layout: Layout | None) -> None:
    """Else kernels would be compiled anew for steps of other sizes."""
    starts = np.full(num_sequences, 1030)
    tables = np.arange(num_sequences * 17, dtype=np.int32).reshape(num_sequences, 17)
    tables[:, :16] = np.arange(100, 116)
    lens = np.ones(num_sequences, dtype=np.int64)
    metadata = build_metadata(QueryTokens(starts, lens, tables, 64), torch.device("cpu"), layout)
    assert (metadata.prefix_rows is not None) == (num_sequences > 1)
    fields = [getattr(metadata, field.name) for field in dataclasses.fields(metadata)]
    if metadata.prefix_rows is not None:
        fields += [getattr(metadata.prefix_rows, field.name) for field in dataclasses.fields(metadata.prefix_rows)]
    arrays = [field for field in fields if isinstance(field, torch.Tensor)]
    assert metadata.work is not None
    arrays += [metadata.work.items, metadata.work.merges]
    assert len(arrays) >= 5
    assert all((array.data_ptr() - metadata.positions.data_ptr()) % 16 == 0 for array in arrays)
    assert metadata.block_tables.tolist() == tables.tolist()


@pytest.mark.parametrize("family", ["qwen3", "mistral"] if THOROUGH else ["qwen3"])
def test_tokens_equal_transformers_and_the_cpus(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    capture = launch.GraphCapture.capture

    def counted(*arguments: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        result, replay = capture(*arguments)
        return result, lambda: (replayed.append(1), replay())

    monkeypatch.setattr(launch.GraphCapture, "capture", counted)
    outputs = make_llm(monkeypatch, str(folder)).generate(*asked, use_tqdm=False)
    assert len(replayed) >= NUM_TOKENS - 1
    on_cpu = LLM(str(folder), device="cpu", kv_cache_bytes=1 << 22).generate(*asked, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=False):
        assert output.outputs[0].token_ids == reference_greedy(folder, prompt, NUM_TOKENS)
    assert outputs[2].outputs[0].token_ids == on_cpu[2].outputs[0].token_ids
    assert outputs[2].prompt_logprobs is not None
    for own, other in zip(outputs[2].prompt_logprobs[1:], on_cpu[2].prompt_logprobs[1:], strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.long_when_interpreted
def test_layers_with_windows_have_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of layers has a window, which is shorter than the prompts; graphs read all block tables."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 21, "layer_types": kinds, "max_window_layers": 0}
    folder = checkpoint("qwen3", num_hidden_layers=len(kinds), **windows)
    llm = make_llm(monkeypatch, str(folder), dtype="float32", mixed_tokens=2)
    assert [group.window for group in llm.engine.model.groups] == [None, 21, 21]
    prompts = [[5 + (7 * place + shift) % 300 for place in range(length)] for shift, length in ((0, 60), (3, 41))]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time the prompts are cached
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.engine.stats().prefix_cache_hits == 48 + 32


@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_models_with_caps_and_sinks_give_transformers_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than their windows, from which the second one shares blocks."""
    folder = folder_of(name)
    prompts = [[5 + (7 * place + place // 32 * shift) % 300 for place in range(40)] for shift in (0, 3)]
    llm = make_llm(monkeypatch, str(folder), dtype="float32", mixed_tokens=2)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_float16_log_probabilities_stay_near_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(checkpoint("qwen3") if THOROUGH else checkpoint("qwen3", num_hidden_layers=1))
    prompt = np.random.default_rng(1).integers(3, VOCAB_SIZE, 20).tolist()
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    llm = make_llm(monkeypatch, folder, dtype="float16", max_num_sequences=1)
    assert llm.engine.model.dtype == "float16"
    (own,), (other,) = (
        each.generate(prompt, params, use_tqdm=False)
        for each in (llm, LLM(folder, device="cpu", dtype="float32", kv_cache_bytes=1 << 22))
    )
    assert own.outputs[0].error is None
    assert own.prompt_logprobs is not None
    assert other.prompt_logprobs is not None
    pairs = [(a.logprob, b.logprob) for a, b in zip(own.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)]
    assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=0.02)
    assert any(a != b for a, b in pairs)


def test_a_cpu_refuses_float16() -> None:
    with pytest.raises(ValueError, match=r"float16 needs a CUDA GPU.*set dtype to bfloat16 or float32"):
        LLM("demo", device="cpu", dtype="float16")


@pytest.mark.long_when_interpreted
def test_graphs_and_kernels_verify_drafts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model, whose own steps that compute what it lacks replay graphs too."""
    folder = checkpoint("llama")
    prompt = np.random.default_rng(2).integers(3, VOCAB_SIZE, 9).tolist()
    num_replays: list[int] = []
    capture = launch.GraphCapture.capture

    def counted(*arguments: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        result, replay = capture(*arguments)
        index = len(num_replays)
        num_replays.append(0)

        def count() -> None:
            num_replays[index] += 1
            replay()

        return result, count

    monkeypatch.setattr(launch.GraphCapture, "capture", counted)
    options = {"proposers": ["draft"], "draft_model": str(folder), "max_draft_tokens": 2, "adaptive": False}
    llm = make_llm(monkeypatch, str(folder), speculative=options, max_num_sequences=1)
    # The model's and the draft model's, to decode, to verify and to compute prompts
    assert num_replays == [1] * 6
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == reference_greedy(folder, prompt, 6)
    assert num_replays[1] > 1
    assert num_replays[2] == 2, "the model's prompt"
    assert num_replays[3] > 1


@pytest.mark.long_when_interpreted
def test_an_eagle3_head_reads_streams_that_graphs_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a prompt and of steps that verify drafts. The head itself runs kernel by kernel."""
    folder = checkpoint("llama", dtype="float32")
    prompt = np.random.default_rng(2).integers(3, VOCAB_SIZE, 9).tolist()
    options = {"proposers": ["eagle3"], "draft_model": str(eagle3_folder()), "max_draft_tokens": 2, "adaptive": False}
    llm = make_llm(monkeypatch, str(folder), dtype="float32", speculative=options, max_num_sequences=1)
    seen = drafts_of(llm)
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == reference_greedy(folder, prompt, 6)
    formula = Eagle3Formula("SpecForge", folder)
    assert len(seen) > 2
    for tokens, drafts in seen:
        assert drafts == formula.drafts(tokens, len(drafts))


RANK_PROMPT, RANK_TOKENS = [5, 9, 13, 40, 7], 4


def generate_as_rank(rank: int, address: str, folder: str) -> tuple[list[int], int]:
    """(tokens, replays of graphs) of one of two ranks, which stands in a process of its own, over gloo."""
    replayed: list[int] = []
    capture = launch.GraphCapture.capture

    def counted(*arguments: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        result, replay = capture(*arguments)
        return result, lambda: (replayed.append(1), replay())

    launch.GraphCapture.capture = counted  # type: ignore[method-assign]
    cuda.NcclGroup = lambda rank, num_ranks, address, device: GlooGroup(rank, num_ranks, address)  # type: ignore
    torch_worker.choose_platform = lambda *arguments: CudaPlatform(DEVICE)  # type: ignore[assignment]
    limits = {"max_model_len": 32, "block_size": 32, "kv_cache_bytes": 1 << 18, "max_num_sequences": 1}
    options = ModelOptions(
        model=folder, dtype="float32", device="cuda", tensor_parallel_size=2, max_num_batched_tokens=32, **limits
    )
    own = torch_worker.TorchWorker(options, RankPlace(rank, address))
    store, tokens = own.group.store, []  # type: ignore[attr-defined]
    replayed.clear()
    position = len(RANK_PROMPT)
    start = SequenceStart(0, SamplingParams(temperature=0), 0, RANK_PROMPT, position)
    step = StepInput(0, [], [start], [], [], [ScheduledSequence(0, 0, position, [0])])
    for index in range(RANK_TOKENS):
        step.sample_points = [SamplePoint(step.num_tokens - 1, 0, position)]
        own.execute(step)
        output = own.sample()
        if rank == 0:
            tokens += output.token_ids[0]
            store.set(f"token {index}", str(tokens[-1]))
        else:
            tokens.append(int(store.get(f"token {index}")))
            own.adopt({0: tokens[-1:]})
        step = StepInput(index + 1, scheduled=[ScheduledSequence(0, position, 1, [])])
        position += 1
    return tokens, len(replayed)


@pytest.mark.prove
@pytest.mark.skipif(DEVICE.type == "cuda", reason="two ranks need two GPUs")
def test_two_ranks_replay_graphs_with_their_sums() -> None:
    folder = str(checkpoint("llama", num_hidden_layers=1))
    store, address = open_store("127.0.0.1")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        ranks = list(pool.map(generate_as_rank, range(2), [address] * 2, [folder] * 2))
    expected = reference_greedy(pathlib.Path(folder), RANK_PROMPT, RANK_TOKENS)
    assert ranks == [(expected, RANK_TOKENS - 1)] * 2
    del store


@NEEDS_GPU
def test_the_demo_model_equals_the_cpus_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own watch over calls that wait: with edits, filters and log-probabilities."""
    llm = make_llm(monkeypatch, "demo", max_model_len=None, max_num_sequences=8, kv_cache_bytes=1 << 26)
    stream, waits = device_of(llm.engine), []
    assert stream.depth == 1

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*arguments)
            except Exception as error:
                waits.append(error)
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    monkeypatch.setattr(stream, "execute", watched(stream.execute))
    monkeypatch.setattr(stream, "draw", watched(stream.draw))
    asked = [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.2, "top_p": 0.9}, {"logit_bias": {7: 2.0}}]
    asked += [{"logprobs": 3}, {"bad_words": ["Manta"]}, {"temperature": 0.0, "min_tokens": 9}, {"n": 2}]
    params = [SamplingParams(**{"max_tokens": 20, "seed": 1} | fields) for fields in asked]
    outputs = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    assert all(output.outputs[0].token_ids for output in outputs)
    assert not waits


@NEEDS_GPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kv_cache_fills_the_remaining_memory(dtype: str) -> None:
    llm = LLM("demo", device="cuda", dtype=dtype, kv_cache_fraction=0.5)
    assert llm.engine.model.kv_cache_bytes > 0.3 * torch.cuda.get_device_properties(0).total_memory


def test_an_older_gpu_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CudaPlatform(DEVICE)
    assert platform.resolve_dtype("auto", "float16") == "bfloat16"
    assert platform.resolve_dtype("auto", "float32") == "float32"
    assert platform.resolve_dtype("float16", "bfloat16") == "float16"
    monkeypatch.setattr(launch, "has_bfloat16", lambda device: False)
    assert platform.resolve_dtype("auto", "bfloat16") == "float32"
    with pytest.raises(ValueError, match=r"capability 8\.0 or higher; set dtype to float16 or float32"):
        platform.resolve_dtype("bfloat16", "bfloat16")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_cuda_engine_claims_a_ray_gpu(num_ranks: int) -> None:
    """One for itself, or one for each rank, whose placement group claims it."""
    pytest.importorskip("ray")
    from manta.cluster.config import EngineConfig
    from manta.cluster.serve.engine.engine_deployment import engine_deployment

    for device, expected in (("cuda", 1 if num_ranks == 1 else 0), ("auto", 0)):
        config = EngineConfig(device=device, tensor_parallel_size=num_ranks, num_threads=1)
        assert engine_deployment(config, 1).ray_actor_options["num_gpus"] == expected
