"""A device kind that is not the CPU: the platform's methods and nothing else, so no one else may reach for the CPU's.

It counts and checks what it is asked for; the arithmetic is the references', and the library of CPU kernels is closed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.structured.masks import MaskBatch
from manta.workers.kernels import build, expert_choice, recurrent_layer, reference, torch_sampler
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.linears import GatedLinear, TorchLinear
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.protocol import Forward, KVCaches, RecurrentKernels, RotaryTables
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.weights import DecoderWeights, Experts, GatedMlpWeights, Linear, LinearWeight, WeightContent
from manta.workers.models.model_config import ExpertsConfig, HeadShape, ModelConfig, ModelError
from manta.workers.pooling.pooling_worker import pooling_dtype
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.torch_worker import torch_worker
from tests.checkpoints import VOCAB_SIZE, checkpoint, reference_greedy
from tests.workers.cpu_forms import forget_libraries

NUM_TOKENS = 12


class PlacedOnly:
    """The reference kernels, for metadata that the platform has made."""

    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    gate = staticmethod(reference.gate)
    layer_norm = staticmethod(reference.layer_norm)
    cap = staticmethod(reference.cap)
    log1p = staticmethod(reference.log1p)
    head_products = staticmethod(reference.head_products)
    recurrent: RecurrentKernels = recurrent_layer
    route = staticmethod(expert_choice.route)

    def __init__(self, placed: list[AttentionMetadata]) -> None:
        self._placed = placed

    def rope_and_cache(self, qkv: torch.Tensor, cos_sin: torch.Tensor, metadata: AttentionMetadata, *rest) -> None:
        assert any(metadata is each for each in self._placed)
        reference.rope_and_cache(qkv, cos_sin, metadata, *rest)

    def paged_attention(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        heads: HeadShape,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert any(metadata is each for each in self._placed)
        return reference.paged_attention(qkv, k_cache, v_cache, metadata, heads, sliding_window, sinks)


class OtherPlatform:
    """What another module in `workers/platforms/` would hold."""

    name = "other"
    device = torch.device("cpu")
    kernel_form = "reference"
    runs_ahead = True
    shares_memory = True
    kv_share = 0.4
    keeps_integers = False
    keeps_float8 = False
    reads_tables_in_files = False
    groups_layers = False
    splits_mlp = False
    adapting = None
    expert_adapting = None
    advice = None
    sampler = torch_sampler

    def __init__(self, compiles: bool) -> None:
        self.placed: list[AttentionMetadata] = []
        self.kernels = PlacedOnly(self.placed)
        self.num_compiled_calls = 0
        self.num_caches = 0
        self.num_inputs = 0
        self.num_weights = 0
        self.num_weights_at_plan = 0
        """Number of placed weights when the KV cache was planned."""
        self._compiles = compiles

    def make_linear(self, weight: LinearWeight) -> Linear:
        self.num_weights += 1
        linear = TorchLinear(weight.dense().to(weight.dtype, copy=True), weight.bias)
        return GatedLinear(linear, functools.partial(reference.gate, weight.activation)) if weight.gated else linear

    def make_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return TorchLinear(weight, bias)

    def shared_linears(self, content: WeightContent) -> nullcontext[None]:
        return nullcontext()

    def share_tensors(self, content: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*tensors]

    def join_experts(self, experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts:
        return LoopedExperts(experts, config.scales_inputs)

    def record_decodes(self, *arguments: object, **options: object) -> None:
        """Nothing to record."""

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> Forward | None:
        """All that a graph of the whole forward pass would be captured from."""
        if not self._compiles:
            return None

        def forward(
            residual: torch.Tensor, cos_sin: RotaryTables, metadata: AttentionMetadata, kv_caches: KVCaches
        ) -> torch.Tensor:
            self.num_compiled_calls += 1
            kernels, heads, eps = self.kernels, config.heads, config.rms_norm_eps
            each_layer = zip(weights.layers, config.sliding_windows, cos_sin, kv_caches, strict=True)
            for layer, window, table, caches in each_layer:
                attention, mlp = layer.mixer, layer.mlp
                qkv = attention.qkv.forward(kernels.rms_norm(residual, layer.input_norm, eps))
                k_cache, v_cache = caches
                norms = attention.q_norm, attention.k_norm
                kernels.rope_and_cache(qkv, table, metadata, k_cache, v_cache, heads, *norms, eps)
                attended = kernels.paged_attention(qkv, k_cache, v_cache, metadata, heads, window)
                residual = residual + attention.output.forward(attended)
                gated = mlp.gated.forward(kernels.rms_norm(residual, layer.mlp_norm, eps))
                residual = residual + mlp.down.forward(gated)
            return kernels.rms_norm(residual, weights.final_norm, eps)

        return forward

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        return "float32"

    def torch_dtype(self, dtype: str) -> torch.dtype:
        return torch.float32

    def place(self, array: np.ndarray) -> torch.Tensor:
        self.num_inputs += 1
        return torch.from_numpy(array)

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return view.to(dtype, copy=True)

    place_embedding = place_weight

    def tied_head(self, table: torch.Tensor) -> Linear:
        return TorchLinear(table)

    def build_metadata(self, tokens: QueryTokens) -> AttentionMetadata:
        metadata = AttentionMetadata.build(tokens._replace(may_share=False))
        self.placed.append(metadata)
        return metadata

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, num_layers: int | None = None
    ) -> torch.Tensor:
        self.num_caches += 1
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return torch.empty(shape, dtype=dtype)

    def free_memory(self, largest_step: Callable[[], object]) -> int:
        self.num_weights_at_plan = self.num_weights
        largest_step()
        return 1 << 30

    def record_event(self) -> None:
        """Calls return when their work is done."""


@pytest.fixture(autouse=True)
def no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever loads them fails."""

    def closed() -> None:
        raise AssertionError("a kernel of the CPU was called beside the platform")

    forget_libraries()
    monkeypatch.setattr(build, "load_library", closed)
    yield
    monkeypatch.undo()
    forget_libraries()


def run(platform: OtherPlatform, family: str, monkeypatch: pytest.MonkeyPatch, **options) -> None:
    """Greedy tokens of a small batch are transformers' own; seeded ones, log-probabilities and penalties are drawn."""
    monkeypatch.setattr(torch_worker, "choose_platform", lambda *arguments: platform)
    folder = checkpoint(family)
    llm = LLM(str(folder), kv_cache_bytes=1 << 22, **options)
    assert llm.engine.model.platform == "other"
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in (5, 40, 23)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(
        seed=1, top_k=20, top_p=0.9, repetition_penalty=1.2, max_tokens=NUM_TOKENS, prompt_logprobs=1, ignore_eos=True
    )
    outputs = llm.generate([*prompts, prompts[0]], [greedy] * 3 + [drawn], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=False):
        assert output.outputs[0].token_ids == reference_greedy(folder, prompt, NUM_TOKENS)
    assert outputs[3].outputs[0].error is None
    assert len(outputs[3].outputs[0].token_ids) == NUM_TOKENS
    assert len(platform.placed) > 0
    assert platform.num_inputs > 0


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_platform_alone_moves_models_to_devices(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = OtherPlatform(compiles=False)
    run(platform, family, monkeypatch)
    assert platform.num_caches == 2  # one for the largest step, which is run to see what it takes


def test_compiled_decoders_replace_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = OtherPlatform(compiles=True)
    run(platform, "qwen2", monkeypatch)
    assert platform.num_compiled_calls == len(platform.placed) > 0


def test_models_of_transformers_ask_the_platform_too(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = OtherPlatform(compiles=False)
    run(platform, "gpt_neox", monkeypatch)
    assert platform.num_caches == 3  # one for the probe at load, and one for the largest step


def test_an_oversized_largest_step_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*arguments: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    platform = OtherPlatform(compiles=False)
    platform.sampler = SimpleNamespace(draw=draw)  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"largest step \(tried .*\); lower max_num_batched_tokens or max_num_seq"):
        run(platform, "llama", monkeypatch)


def test_a_draft_is_placed_before_kv_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what its weights and its largest step leave free; that step also draws under everything a request may ask."""
    platform = OtherPlatform(compiles=False)
    speculative = {"proposers": ["draft"], "draft_model": str(checkpoint("llama"))}
    rows, kinds = [], set()

    def draw(
        logits: torch.Tensor, sequences: list[SequenceState], positions: Any, state: Any, masks: MaskBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        params = sequences[0].params
        rows.append(len(logits))
        kinds.add((params.repetition_penalty != 1, params.top_p < 1, masks is not None))
        return torch_sampler.draw(logits, sequences, positions, state, masks)

    platform.sampler = SimpleNamespace(draw=draw, logprobs=torch_sampler.logprobs)  # type: ignore[assignment]
    run(platform, "llama", monkeypatch, speculative=speculative, max_num_sequences=5)
    assert platform.num_caches == 4  # two for the largest steps
    assert [count for count in rows[:18] if count > 1] == [5 * (1 + 8), 5]
    assert len(kinds) == 8
    assert platform.num_weights_at_plan == platform.num_weights > 0


def test_a_model_that_pools_computes_in_what_the_device_has() -> None:
    """`auto` asks for no dtype that a device lacks, such as bfloat16 on older GPUs."""
    platform = OtherPlatform(compiles=False)
    assert pooling_dtype("auto", "bfloat16", platform) == "float32"
    assert pooling_dtype("auto", "float16", platform) == "float32"
