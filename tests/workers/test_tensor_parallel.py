"""Several ranks compute what one does: token for token in float32, whatever is asked of the engine.

The processes live as long as the file's tests and hold one model after the other. `over_ranks` asserts beside that no
rank ever disagreed.
"""

from __future__ import annotations

import pathlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from manta.cluster.config import EngineConfig
from manta.cluster.llm import LLM, BeamSearchParams, LogitsProcessorSpec, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.checkpoints.shard import Shard
from manta.workers.kernels import build, cpu_linear
from manta.workers.model_options import ModelOptions
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.weight_specs import Split, WeightPart
from manta.workers.parallel.split import EXACT_GATES, check_num_ranks, shard_config, split_outputs
from manta.workers.step import ScheduledSequence, SequenceStart, StepInput
from manta.workers.torch_worker.torch_worker import TorchWorker
from tests.adapters import adapters_of, write_adapter
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.draft_heads import folder_with_head
from tests.eagle3_heads import eagle3_folder
from tests.engine.test_constrained_drafts import mixed_params
from tests.families.tiny import make_model, tiny_config
from tests.pairs import in_turns
from tests.specdecode.test_speculative import SAMPLED
from tests.workers import rank_child
from tests.workers.cpu_forms import COMPILED
from tests.workers.rank_processes import RankFailed, RankProcesses, in_forms, over_ranks
from tests.workers.test_layer_kinds import folder_of

pytestmark = pytest.mark.usefixtures("plugin", "cheap_groups")

needs_kernels = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler: gloo alone serves")

LONG_KINDS = ("glm_moe_dsa", "longcat_flash", "axk1", "hy_v4", "deepseek_v4")
NUM_TOKENS = 24
NUM_STATES = 256
"""Recurrent states for which the caches have room, if the model has any."""
Ask = Callable[[LLM], Any]


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    ranks = RankProcesses(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two(four: RankProcesses) -> RankProcesses:
    return four.first(2)


def assert_same(ranks: RankProcesses, ask: Ask, folder: str, num_blocks: int = 256, **options: Any) -> None:
    """With as many blocks, which for a rank's share of the heads take less."""
    options.setdefault("constraints", {"compile_seconds": 60.0})  # for a machine that has much else to do
    expected = ask(make_llm(folder, 1, num_blocks, **{**options, "overlap": "off"}))
    with over_ranks(ranks) as executors:
        assert ask(make_llm(folder, ranks.num_ranks, num_blocks, **options)) == expected
    (executor,) = executors
    assert executor.num_steps > 0
    assert executor.num_disagreements == 0


def make_llm(folder: str, num_ranks: int, num_blocks: int, **options: Any) -> LLM:
    share = shard_config(load_model_config(folder), num_ranks)
    kv_cache_bytes = 16 * num_blocks * share.kv_bytes_per_token("float32") + NUM_STATES * share.state_bytes
    return LLM(folder, dtype="float32", num_threads=1, kv_cache_bytes=kv_cache_bytes, **options)


def prompts() -> list[list[int]]:
    """Repetitive ones of mixed lengths, two of which share blocks."""
    generator = random.Random(3)
    found = []
    for length in (4, 18, 40, 64, 9):
        period = [generator.randrange(5, VOCAB_SIZE - 5) for _ in range(max(3, length // 3))]
        found.append((period * length)[:length])
    return [*found, [*found[3][:48], 7, 8]]


def generated(*requests: SamplingParams) -> Ask:
    """What every choice gets: tokens, end, text, and ids and ranks of its log-probabilities."""

    def ask(llm: LLM) -> Any:
        answers: list[Any] = []
        inputs = [prompts()[index % 6] for index in range(len(requests))]
        for output in llm.generate(inputs, list(requests), use_tqdm=False):
            answers.append([entry and (entry.token_id, entry.rank) for entry in output.prompt_logprobs or []])
            for choice in output.outputs:
                assert choice.error is None
                entries = [(entry.token_id, entry.rank, entry.top_token_ids) for entry in choice.logprobs or []]
                answers.append((choice.token_ids, choice.finish_reason, choice.text, entries))
        llm.engine.step()
        llm.engine.check_integrity()
        return answers

    return ask


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields})


ALL_GREEDY = generated(*[greedy()] * 6)


def beams(llm: LLM) -> Any:
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    return [[sequence.token_ids for sequence in found] for found in llm.beam_search(prompts()[:3], params)]


def automata() -> list[SamplingParams]:
    automaton = LogitsProcessorSpec(name="automaton", arguments={"num_states": 97})
    fields = {"logits_processors": (automaton,), "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [SamplingParams(seed=seed, n=1 + seed % 2, **fields) for seed in range(6)]


def drafting(proposer: str, **fields: Any) -> dict[str, Any]:
    return {"speculative": {"proposers": ["forced", proposer], "ngram_min": 1, "adaptive": False, **fields}}


CONSTRAINED = generated(*mixed_params(max_tokens=40)[::3])
REQUESTS: dict[str, tuple[Ask, dict[str, Any]]] = {
    "log-probabilities": (generated(*[greedy(prompt_logprobs=2, logprobs=1)] * 6), {}),
    "seeds and every parameter": (generated(*SAMPLED), {}),
    "a tiny pool, in chunks": (generated(*SAMPLED), {"num_blocks": 9, "max_num_batched_tokens": 11}),
    "constraints": (CONSTRAINED, {}),
    "several choices": (generated(*[SamplingParams(n=n, seed=n, max_tokens=12) for n in (3, 1, 5, 2, 4, 3)]), {}),
    "logits processors": (generated(*automata()), {}),
    "beams": (beams, {}),
    "beams in a tiny pool": (beams, {"num_blocks": 12}),
    "n-grams": (generated(*SAMPLED), drafting("ngram")),
    "an EAGLE-3 head": (generated(*SAMPLED), drafting("eagle3", draft_model=str(eagle3_folder()))),
    "n-grams under constraints": (CONSTRAINED, drafting("ngram")),
    "n-grams, adaptive": (ALL_GREEDY, drafting("ngram", adaptive=True)),
    "a draft model": (generated(*SAMPLED), drafting("draft", draft_model=str(checkpoint("qwen3")))),
    "a draft model, adaptive": (
        ALL_GREEDY,
        drafting("draft", draft_model=str(checkpoint("llama", dtype="float32")), adaptive=True),
    ),
}


@pytest.mark.parametrize(
    ("family", "max_shard_size"), in_turns(["llama", "llama3", "mistral", "qwen2", "qwen3"], ["1GB", "50KB"])
)
def test_two_ranks_draw_the_tokens_of_one(two: RankProcesses, family: str, max_shard_size: str) -> None:
    assert_same(two, ALL_GREEDY, str(checkpoint(family, max_shard_size=max_shard_size)))


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.prove)])
def test_rank_0_drafts_with_the_head_of_the_checkpoint(two: RankProcesses, kind: str) -> None:
    assert_same(two, ALL_GREEDY, str(folder_with_head(kind)), **drafting("mtp"))


def test_ranks_give_back_the_same_blocks(two: RankProcesses) -> None:
    """Five layers in six have a window, which is shorter than the prompts."""
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 21, "layer_types": kinds, "max_window_layers": 0}
    path = str(checkpoint("qwen3", num_hidden_layers=len(kinds), **windows))
    assert_same(two, ALL_GREEDY, path, max_num_batched_tokens=32)


@pytest.mark.parametrize(
    "kind",
    [
        *("gemma3", "olmo3", "glm4", "phi3", "cohere2", "deepseek_v2", "deepseek_v3", "llama4", "gemma3n", "lfm2"),
        *(pytest.param(kind, marks=pytest.mark.prove) for kind in LONG_KINDS),
    ],
)
def test_two_ranks_split_every_kind_of_layer(two: RankProcesses, kind: str) -> None:
    assert_same(two, ALL_GREEDY, str(folder_of(kind)))


OTHER_STATES = ("qwen3_5", "falcon_h1", "nemotron_h", "mamba2", "lfm2", "olmo_hybrid", "bailing_hybrid", "lara_mini")
OTHER_STATES += ("lfm3", "recurrent_gemma", "qwen4_exp", "inkling", "inkling2", "inkling2_loop", "rwkv", "glm5_next")
OTHER_HEADS = ("gemma4", "gemma4, experts", "dots3_note", "mimo_v2")
"""Families whose layers have different heads."""


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_next",
        "granite_hybrid",
        "jamba",
        "minimax",
        "zamba2",
        "xlstm",
        *(pytest.param(kind, marks=pytest.mark.prove) for kind in (*OTHER_STATES, *OTHER_HEADS)),
    ],
)
def test_two_ranks_split_recurrent_mixers(two: RankProcesses, kind: str) -> None:
    assert_same(two, ALL_GREEDY, str(folder_of(kind)))


@pytest.mark.prove
def test_two_ranks_share_latent_vectors_of_earlier_layers(two: RankProcesses, tmp_path: pathlib.Path) -> None:
    make_model("mistral_large4", tiny_config("mistral_large4"), tmp_path)
    assert_same(two, ALL_GREEDY, str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixtral", {}),
        pytest.param("glm4_moe", {"overlap": "on"}, marks=pytest.mark.prove),
        pytest.param("deepseek_v3", drafting("mtp"), marks=pytest.mark.prove),
        pytest.param("gpt_oss", drafting("ngram"), marks=pytest.mark.prove),
    ],
)
def test_four_ranks_divide_experts(four: RankProcesses, kind: str, options: dict[str, Any]) -> None:
    """`test_expert_parallel.py` compares the logits of each family."""
    folder = str(folder_with_head(kind) if "mtp" in str(options) else folder_of(kind))
    assert_same(four, ALL_GREEDY, folder, expert_parallel=True, **options)


def test_four_ranks_share_key_heads_under_one_norm(four: RankProcesses) -> None:
    """Its squares are counted once, although two ranks hold the same key head."""
    assert_same(four, ALL_GREEDY, str(folder_of("olmo2")))


@pytest.mark.few(6)
@pytest.mark.parametrize("what", REQUESTS)
def test_whatever_is_asked(two: RankProcesses, what: str) -> None:
    ask, options = REQUESTS[what]
    assert_same(two, ask, str(checkpoint("llama", dtype="float32")), **options)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "what", ["a tiny pool, in chunks", "log-probabilities", "constraints", "logits processors", "beams in a tiny pool"]
)
def test_whatever_is_asked_of_the_overlapped_loop(two: RankProcesses, what: str) -> None:
    ask, options = REQUESTS[what]
    assert_same(two, ask, str(checkpoint("llama", dtype="float32")), overlap="on", **options)


@pytest.mark.parametrize("family", ["llama", pytest.param("phi3", marks=pytest.mark.prove)])
def test_ranks_split_adapters_as_they_split_linears(two: RankProcesses, family: str) -> None:
    adapters = adapters_of(checkpoint(family))
    adapters.add("ranks", 3, r=6)
    assert_same_adapted(two, str(checkpoint(family)), adapters.folders["ranks"])


@pytest.mark.prove
def test_ranks_that_divide_experts_split_adapters_of_shared_experts(two: RankProcesses, tmp_path: pathlib.Path) -> None:
    modules = "shared_expert.up_proj", "shared_expert.down_proj", "o_proj"
    adapter = write_adapter(folder_of("qwen3_next"), tmp_path / "adapter", modules, 4)
    assert_same_adapted(two, str(folder_of("qwen3_next")), str(adapter), expert_parallel=True)


@pytest.mark.prove
def test_ranks_split_adapters_of_experts_as_they_split_these(two: RankProcesses, tmp_path: pathlib.Path) -> None:
    base = checkpoint("mixtral", dtype="float32")
    modules = tuple(f"experts.{expert}.{name}" for expert in range(4) for name in ("w1", "w2", "w3"))
    assert_same_adapted(two, str(base), str(write_adapter(base, tmp_path / "adapter", modules, 5)))


@pytest.mark.prove
def test_ranks_split_adapters_of_absorbed_weights(two: RankProcesses, tmp_path: pathlib.Path) -> None:
    adapter = write_adapter(folder_of("deepseek_v2"), tmp_path / "adapter", ("kv_b_proj", "q_b_proj"), 4)
    assert_same_adapted(two, str(folder_of("deepseek_v2")), str(adapter))


def assert_same_adapted(ranks: RankProcesses, folder: str, adapter: str, **options: Any) -> None:
    def ask(llm: LLM) -> Any:
        names = ["ranks", "", "ranks"]
        answers = llm.generate(prompts()[:3], greedy(), use_tqdm=False, adapter=names)
        return [answer.outputs[0].token_ids for answer in answers]

    assert_same(ranks, ask, folder, adapters={"ranks": adapter}, **options)


def test_a_failed_row_costs_the_others_nothing(two: RankProcesses) -> None:
    """The next step was planned with it: ranks that draw nothing must have the token that stands in its place."""

    def ask(llm: LLM) -> Any:
        fails = SamplingParams(allowed_token_ids=(5,), stop_token_ids=(5,), min_tokens=3, max_tokens=9)
        requests = [greedy(), fails, greedy(n=2, seed=3)]
        outputs = llm.generate(prompts()[:3], requests, use_tqdm=False)
        return [[(choice.token_ids, choice.error) for choice in output.outputs] for output in outputs]

    assert_same(two, ask, str(checkpoint("llama", dtype="float32")), overlap="on")


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["seeds and every parameter", "constraints", "beams", "n-grams"])
def test_four_ranks_hold_two_kv_heads_twice(four: RankProcesses, what: str) -> None:
    ask, options = REQUESTS[what]
    folder = str(checkpoint("llama", dtype="float32"))
    assert load_model_config(folder).num_kv_heads == 2
    assert_same(four, ask, folder, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"vocab_size": VOCAB_SIZE - 1},
        {"tie_word_embeddings": True, "vocab_size": VOCAB_SIZE - 1},
        {"intermediate_size": 40},
        {"dtype": "float16"},
    ],
    ids=", ".join,
)
def test_biases_count_once_and_sizes_are_padded(two: RankProcesses, options: dict[str, Any]) -> None:
    assert_same(two, ALL_GREEDY, str(checkpoint("llama", **options)))


def test_ranks_without_shared_memory_use_tcp(two: RankProcesses) -> None:
    two.call_all(rank_child.share_memory, False)
    try:
        assert_same(two, generated(*SAMPLED), str(checkpoint("llama", dtype="float32")))
        assert not any(two.call_all(rank_child.shares_memory))
    finally:
        two.call_all(rank_child.share_memory, True)


@needs_kernels
def test_the_layers_of_a_rank_are_one_call(two: RankProcesses) -> None:
    two.make_workers(EngineConfig(model=str(checkpoint("llama")), dtype="float32"))
    assert two.call_all(rank_child.num_called_back) == [0, 0]


EXACT_KINDS = ("kimi_linear", "lfm2", "qwen3_5", "falcon_h1", "jamba", "minimax", "mamba2", "minicpm3", "olmo_hybrid")
EXACT_SIZES: dict[str, Any] = {"intermediate_size": 192, "attention_bias": True, "mlp_bias": True}
"""A share of the MLP is 48 wide on four ranks, and one of the attention 16: inside the groups of a scale."""


def bits(folder: str, names: Sequence[str] | None = None, **options: Any) -> Any:
    """Every token and log-probability of an exact engine, to the last bit. `names` are the requests' adapters."""
    defaults = {"dtype": "bfloat16", "exact": True, "num_threads": 1, "kv_cache_bytes": 8 << 20}
    llm = LLM(folder, **(defaults | options))
    params, adapter = [greedy(logprobs=3), *SAMPLED[:5]], [""] * 6 if names is None else list(names)
    outputs = llm.generate(prompts(), params, use_tqdm=False, adapter=adapter)
    choices = [choice for output in outputs for choice in output.outputs]
    assert all(choice.error is None for choice in choices)
    return [
        (choice.token_ids, [(entry.logprob, entry.top_logprobs) for entry in choice.logprobs or []])
        for choice in choices
    ]


@needs_kernels
@pytest.mark.parametrize(("weights", "cache"), in_turns(["int8", "int4"], ["int8", "int4", "auto"]))
def test_exact_ranks_of_unlike_forms_agree(two: RankProcesses, four: RankProcesses, weights: str, cache: str) -> None:
    """Without `exact` ranks sum in another order, and a key may be rounded to the next step of a rounded cache."""
    folder = str(checkpoint("llama", **EXACT_SIZES))
    expected = bits(folder, weights=weights, kv_cache_dtype=cache)
    for ranks in (two, four):
        with in_forms(ranks, COMPILED[::-1]), over_ranks(ranks) as executors:
            assert bits(folder, weights=weights, kv_cache_dtype=cache) == expected
            assert ranks.call_all(rank_child.num_called_back) == [0] * ranks.num_ranks
        assert executors[0].num_disagreements == 0


@needs_kernels
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [*EXACT_KINDS, "gemma3n", "glm_moe_dsa", "hy_v4", "deepseek_v4", "glm5_next"])
def test_exact_ranks_split_every_mixer(two: RankProcesses, kind: str) -> None:
    """`test_quantised_ranks.py` compares the logits of each kind."""
    folder = str(folder_of(kind))
    expected = bits(folder, weights="int8")
    with in_forms(two, COMPILED[::-1]), over_ranks(two):
        assert bits(folder, weights="int8") == expected


@needs_kernels
@pytest.mark.prove
def test_exact_ranks_split_adapters(four: RankProcesses) -> None:
    adapters = adapters_of(checkpoint("llama", **EXACT_SIZES))
    adapters.add("ranks", 3, r=6)
    names, options = ["ranks", "", "ranks"] * 2, {"weights": "int8", "adapters": dict(adapters.folders)}
    expected = bits(str(adapters.base), names, **options)
    assert expected != bits(str(adapters.base), **options)
    with in_forms(four, COMPILED[::-1]), over_ranks(four):
        assert bits(str(adapters.base), names, **options) == expected


@needs_kernels
@pytest.mark.prove
@pytest.mark.parametrize("kind", ["jamba", "kimi_linear", "gpt_oss"])
def test_exact_ranks_divide_experts(two: RankProcesses, kind: str) -> None:
    folder = str(folder_of(kind))
    expected = bits(folder, weights="int8")
    with in_forms(two, COMPILED[::-1]), over_ranks(two):
        assert bits(folder, weights="int8", expert_parallel=True) == expected


@needs_kernels
def test_exact_ranks_over_tcp_give_equal_bits(two: RankProcesses) -> None:
    folder = str(checkpoint("llama", **EXACT_SIZES))
    expected = bits(folder, weights="int8")
    two.call_all(rank_child.share_memory, False)
    try:
        with over_ranks(two):
            assert bits(folder, weights="int8") == expected
    finally:
        two.call_all(rank_child.share_memory, True)


@needs_kernels
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {},
            "4 ranks cannot split the 6 blocks of 16 gates, which exact keeps whole, of .* to one of 1, 2, or set ex",
        ),
        (
            {"hidden_size": 66, "head_dim": 16},
            "4 ranks cannot split the hidden size 66 of .* to one of 1, 2, or set ex",
        ),
        ({"intermediate_size": 98}, "4 ranks cannot split the intermediate size 98 of .* to one of 1, 2$"),
    ],
)
def test_sizes_that_ranks_cannot_split_exactly_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make_worker(str(checkpoint("qwen3", **sizes)), 4, weights="int8", exact=True)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_identical_and_rounded_once(four: RankProcesses, dtype: torch.dtype) -> None:
    """Sizes that fill no vector, one slot and several."""
    four.make_workers(EngineConfig(model=str(checkpoint("llama")), dtype="float32"))
    assert all(four.call_all(rank_child.shares_memory))
    for shape in ((1,), (3, 7), (1, 896), (160, 896)):
        parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        for found in four.call_all(rank_child.all_reduce, parts):
            assert torch.equal(found, expected.to(dtype))
        first, *others = four.call_all(rank_child.all_reduce_over_tcp, parts)
        assert all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first, expected.to(dtype), atol=0.05, rtol=0.02)
        gathered, *nothing = four.call_all(rank_child.gather, parts)
        assert nothing == [None] * 3
        assert all(torch.equal(found, part) for found, part in zip(gathered, parts, strict=True))
        if len(shape) == 2:
            side_by_side = torch.cat(parts, dim=1)
            assert all(torch.equal(found, side_by_side) for found in four.call_all(rank_child.all_gather, parts))


def test_the_least_memory_of_all_ranks_counts(two: RankProcesses) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), dtype="float32")
    block_bytes = config.block_size * shard_config(load_model_config(config.model), 2).kv_bytes_per_token("float32")
    address = two.call(0, rank_child.open_address)
    for rank, num_blocks in enumerate((40, 30)):
        one = msgspec.structs.replace(config, kv_cache_bytes=num_blocks * block_bytes)
        two.tell(rank, rank_child.make_worker, one, rank, 2, address)
    infos = [two.answer(rank) for rank in range(2)]
    assert [info.num_blocks for info in infos] == [30, 30]
    assert infos[0].max_model_len == infos[1].max_model_len == 480
    assert two.call_all(rank_child.num_sharing_memory) == [2, 2]


def test_a_rank_that_takes_another_token_is_noticed(two: RankProcesses) -> None:
    """The sum of both ranks' embeddings is the same everywhere, and so are the hidden states behind it."""
    with over_ranks(two) as executors:
        llm = LLM(str(checkpoint("llama")), dtype="float32")
    (executor,) = executors
    llm.add_request("a", prompts()[0], greedy())
    for _ in range(5):
        llm.step()
    assert executor.num_disagreements == 0
    executor.gained = {sequence: [token - 3 for token in gained] for sequence, gained in executor.gained.items()}
    llm.step()
    assert executor.num_disagreements == 1


def test_a_step_failing_on_every_rank_is_recomputed(two: RankProcesses) -> None:
    ask = generated(*SAMPLED)
    folder = str(checkpoint("llama"))
    expected = ask(LLM(folder, dtype="float32", num_threads=1))
    with over_ranks(two) as executors:
        llm = LLM(folder, dtype="float32", num_threads=1)
    llm.add_request("before", prompts()[1], greedy())
    llm.step()
    two.call_all(rank_child.fail_next_step)
    assert ask(llm) == expected
    assert executors[0].num_rebuilt == 1
    assert executors[0].num_disagreements == 0


def test_a_rank_waiting_for_a_dead_one_says() -> None:
    """In the middle of a step: the one call for all layers returns, and Python raises."""
    ranks = RankProcesses(2)
    try:
        ranks.make_workers(EngineConfig(model=str(checkpoint("llama")), dtype="float32"))
        shares_memory = all(ranks.call_all(rank_child.shares_memory))
        start = SequenceStart(0, greedy(), 0, prompts()[1], 18)
        ranks.tell(
            0, rank_child.execute, StepInput(0, started=[start], scheduled=[ScheduledSequence(0, 0, 18, [0, 1])]), None
        )
        time.sleep(0.2)
        ranks.processes[1].kill()
        with pytest.raises(RankFailed, match="rank 1 of 2 died" if shares_memory else "RuntimeError"):
            ranks.answer(0)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "words"),
    [
        (
            {},
            3,
            r"3 ranks cannot split the 4 attention heads of this LlamaForCausalLM evenly; set .* to one of 1, 2, 4$",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            2,
            "the 3 KV heads .* to one of 1, 3, 6$",
        ),
        ({"intermediate_size": 98}, 4, "the intermediate size 98 .* to one of 1, 2$"),
    ],
)
def test_unsplittable_sizes_are_refused_early(sizes: dict[str, int], num_ranks: int, words: str) -> None:
    folder = checkpoint("llama", **sizes)
    with pytest.raises(ModelError, match=words):
        make_worker(str(folder), num_ranks)


@pytest.mark.parametrize(
    ("kind", "words"), [("zamba", "the 2 heads of Mamba"), ("zaya", "the convolutions of queries and keys")]
)
def test_mixers_that_are_not_split_are_refused(kind: str, words: str) -> None:
    with pytest.raises(ModelError, match=rf"2 ranks cannot split {words} of this {kind.title()}.* to one of 1$"):
        make_worker(str(folder_of(kind)), 2)


@pytest.mark.parametrize(("family", "name"), [("gpt_neox", "GPTNeoX"), ("falcon", "Falcon"), ("bloom", "Bloom")])
def test_a_model_that_runs_through_transformers_is_refused(family: str, name: str) -> None:
    words = rf"{name}ForCausalLM runs through transformers.*set tensor_parallel_size to 1"
    with pytest.raises(ModelError, match=words):
        make_worker(str(checkpoint(family)), 2)


def make_worker(folder: str, num_ranks: int, **options: Any) -> TorchWorker:
    """Without a group: what is refused later than the configuration is read would raise for its lack."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_num_sequences": 4, **options}
    return TorchWorker(ModelOptions(model=folder, tensor_parallel_size=num_ranks, **options))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_shares_of_all_ranks_are_the_checkpoint(num_ranks: int, exact: bool) -> None:
    """With fewer KV heads than ranks, several ranks hold one; rows after the vocabulary are zeros."""
    config = load_model_config(checkpoint("llama"))
    spec = split_outputs(describe(config)) if exact else describe(config)
    shards = [Shard(rank, num_ranks, config.num_kv_heads) for rank in range(num_ranks)]
    for linear in spec.linears():
        for part in linear.parts:
            whole, bias = torch.randn(part.out_features, linear.in_features), torch.randn(part.out_features)
            shares = [shard.take(part, linear.splits_inputs, whole) for shard in shards]
            biases = [shard.take_bias(part, linear.splits_inputs, bias) for shard in shards]
            if linear.splits_inputs:
                assert torch.equal(torch.cat(shares, dim=1), whole), part.name
                assert torch.equal(torch.stack(biases).sum(0), bias), part.name
                continue
            repeats = num_ranks // config.num_kv_heads if part.split is Split.KV_HEADS else 1
            assert torch.equal(torch.cat(shares[::repeats]), whole), part.name
            assert torch.equal(torch.cat(biases[::repeats]), bias), part.name
            for rank, share in enumerate(shares):
                assert torch.equal(share, shares[rank // repeats * repeats]), part.name
    norm = torch.randn(64)
    assert all(shard.take(WeightPart("norm", 64), False, norm) is norm for shard in shards)
    words = WeightPart("words", 5, Split.VOCABULARY)
    padded = torch.cat([shard.take(words, False, torch.ones(5, 3)) for shard in shards])
    assert padded.sum(1).tolist() == [3.0] * 5 + [0.0] * (len(padded) - 5)


def test_each_number_of_ranks_that_is_offered_splits() -> None:
    config = load_model_config(checkpoint("llama"))
    for num_ranks in (1, 2, 4):
        check_num_ranks(config, num_ranks)
        share: ModelConfig = shard_config(config, num_ranks)
        assert share.num_heads * num_ranks == config.num_heads
        assert share.num_kv_heads * num_ranks == max(config.num_kv_heads, num_ranks)


def test_exact_keeps_the_kernels_gates_whole() -> None:
    assert EXACT_GATES == cpu_linear.GATES
