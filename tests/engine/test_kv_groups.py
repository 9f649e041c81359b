"""A model whose layers have different sliding windows: they form groups, each of which gives back blocks by itself.

The model is a tiny Qwen3 with Gemma 3's pattern: five layers with a window, then one without. The prompts are many
windows long, and the window is no multiple of a block.
"""

from __future__ import annotations

import random

import pytest

from manta.cluster.cli.check import run_check
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.request import EngineRequest
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_groups import BlockNeeds, KVGroup, group_layers
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepOutput
from tests.checkpoints import VOCAB_SIZE, checkpoint, reference_greedy
from tests.engine.test_engine import drain, run
from tests.engine_parts import poison_block

WINDOW = 21
BLOCK_TOKENS = 16
PATTERN = [*["sliding_attention"] * 5, "full_attention"]
MIXED = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": PATTERN,
    "num_hidden_layers": len(PATTERN),
    "max_window_layers": 0,
}
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def folder(**options):
    return checkpoint("qwen3", **{**MIXED, **options})


def make_engine(num_blocks: int = 600, path=None, **options) -> Engine:
    path = path or folder()
    block_bytes = load_model_config(path).kv_bytes_per_token("float32") * BLOCK_TOKENS // len(PATTERN)
    return Engine(EngineConfig(model=str(path), kv_cache_bytes=block_bytes * num_blocks, dtype="float32", **options))


def make_prompts() -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (150, 7, 96, 33, 200)]


def expected(prompts: list[list[int]]) -> list[list[int]]:
    return [reference_greedy(folder(), prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 19},
        {"num_blocks": 44, "max_num_batched_tokens": 32},
        {"speculative": SpeculativeConfig(proposers=("ngram",))},
    ],
    ids=["batched", "chunked", "preempted", "drafts"],
)
def test_greedy_tokens_equal_transformers(options: dict) -> None:
    prompts = make_prompts()
    engine = make_engine(**options)
    assert run(engine, prompts, GREEDY) == expected(prompts)
    assert [group.window for group in engine.model.groups] == [None, *[WINDOW] * 5]
    assert bool(engine.stats().num_preemptions) == ("num_blocks" in options)


def test_the_window_matters() -> None:
    (prompt, *_) = make_prompts()
    whole = folder(use_sliding_window=False)
    assert run(make_engine(path=whole), [prompt], GREEDY) != expected([prompt])


@pytest.mark.parametrize("num_cached", [1, 3, 9])
def test_a_cached_prefix_of_any_length_changes_nothing(num_cached: int) -> None:
    """`num_cached` blocks were computed before, so the first of them have left the window."""
    (prompt, *_) = make_prompts()
    engine = make_engine()
    run(engine, [prompt[: num_cached * BLOCK_TOKENS]], GREEDY)
    assert run(engine, [prompt], GREEDY) == expected([prompt])
    assert engine.stats().prefix_cache_hits == num_cached * BLOCK_TOKENS


def test_the_choices_of_a_prompt_share_its_blocks_in_every_group() -> None:
    (prompt, *_) = make_prompts()
    params = SamplingParams(temperature=0.8, seed=3, n=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    together, tight = ([*choices_of(make_engine(num_blocks), prompt, params)] for num_blocks in (600, 72))
    apart = [choices_of(make_engine(max_num_batched_tokens=23), prompt, params)[index] for index in range(4)]
    assert together == tight == apart
    assert len({tuple(tokens) for tokens in together}) == 4


def choices_of(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine.add_request(EngineRequest(request_id="0", prompt_token_ids=prompt, params=params))
    outputs: list[list[int]] = [[] for _ in range(params.n)]
    for delta in drain(engine):
        assert delta.error is None
        outputs[delta.index] += delta.token_ids
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return outputs


@pytest.mark.parametrize("path", [folder(), checkpoint("mistral")], ids=["mixed", "all layers with a window"])
def test_a_draft_model_keeps_what_it_reads(path) -> None:
    prompts = make_prompts()
    speculative = SpeculativeConfig(proposers=("draft",), draft_model=str(checkpoint("qwen3")), adaptive=False)
    engine = make_engine(path=path, speculative=speculative)
    assert run(engine, prompts, GREEDY) == [reference_greedy(path, prompt, NUM_TOKENS) for prompt in prompts]
    assert engine.model.groups[0].window is None


def test_layers_of_one_window_give_blocks_back() -> None:
    """Every layer of this Mistral sees 24 positions, so 4 blocks serve a sequence of any length."""
    path = checkpoint("mistral")
    num_bytes = load_model_config(path).kv_bytes_per_token("float32") * BLOCK_TOKENS * 5
    engine = Engine(EngineConfig(model=str(path), kv_cache_bytes=num_bytes, max_num_batched_tokens=16))
    assert engine.max_model_len == 512
    (prompt, *_) = make_prompts()
    assert run(engine, [prompt], GREEDY) == [reference_greedy(path, prompt, NUM_TOKENS)]


def test_a_failed_row_leaves_nothing_behind_in_any_group() -> None:
    """A block of the window is poisoned and given back; whoever comes later computes it again."""
    (prompt, *_) = make_prompts()
    engine = make_engine(max_num_batched_tokens=32)
    engine.add_request(EngineRequest(request_id="0", prompt_token_ids=prompt, params=GREEDY))
    engine.step()
    (sequence,) = engine.scheduler.running
    poison_block(engine, sequence.block_tables[1][1])
    (final,) = [delta for delta in drain(engine) if delta.finish]
    assert final.error is not None
    assert run(engine, [prompt], GREEDY) == expected([prompt])


@pytest.mark.parametrize("cached", ["int8", "int4"])
def test_rounded_caches_have_groups(cached: str) -> None:
    prompts = make_prompts()
    plain, tight = (run(make_engine(n, kv_cache_dtype=cached), prompts, GREEDY) for n in (600, 30))
    assert plain == tight


def test_a_long_sequence_takes_what_its_windows_need() -> None:
    """32k tokens in 30 layers, 25 of them with a window of 1024: at most 1.1 times the positions that layers see."""
    windows = [*[1024] * 5, None] * 5
    layers = group_layers(windows)
    scheduler = Scheduler(
        max_num_batched_tokens=2048,
        max_num_sequences=1,
        max_model_len=1 << 17,
        blocks=KVBlocks(1 << 14, BLOCK_TOKENS, groups=layers.groups),
    )
    sequence = Sequence(0, "0", [1] * (1 << 15), SamplingParams(max_tokens=40, ignore_eos=True), 0)
    scheduler.add(sequence)
    held = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        held.append(len(sequence.held_blocks()))
        scheduler.update(step, StepOutput(step.step_id, {point.sequence_id: [1] for point in step.sample_points}))
    needed = sum(len(sequence.token_ids) if window is None else window for window in windows)
    assert held[-1] * BLOCK_TOKENS * layers.layers_per_block <= 1.1 * needed
    longest_chunk = BlockNeeds(layers.groups, BLOCK_TOKENS, 2048).of_sequence(len(sequence.token_ids))
    assert max(held) <= longest_chunk


@pytest.mark.parametrize(
    ("windows", "layers_per_block", "num_groups"),
    [
        ([None] * 28, 28, 1),
        ([4096] * 32, 32, 1),
        ([1024, None] * 12, 12, 2),
        ([*[128] * 5, None] * 8, 8, 6),
        ([*[512] * 5, None] * 5 + [512] * 4, 5, 7),
        (list(range(1, 11)), 1, 10),
    ],
    ids=["Llama", "Mistral", "gpt-oss", "Gemma 3 12B", "Gemma 3 4B", "ten windows"],
)
def test_the_blocks_of_all_groups_are_equal(windows: list[int | None], layers_per_block: int, num_groups: int) -> None:
    layers = group_layers(windows)
    assert (layers.layers_per_block, len(layers.groups)) == (layers_per_block, num_groups)
    assert len(set(layers.layers)) == len(windows), "two layers share a place"
    assert [layers.groups[place.group].window for place in layers.layers] == windows
    assert all(place.number < layers_per_block for place in layers.layers)


@pytest.mark.usefixtures("trials_here")
def test_a_check_says_what_sequences_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(None, {"engine": {"model": str(folder()), "device": "cpu", "dtype": "float32"}}) == 0
    printed = capsys.readouterr().out
    assert (
        "5 of 6 layers see 21 positions, 1 of 6 layers see all positions; a block has 16 tokens of 1 layers" in printed
    )
    assert "1,024 tokens" in printed


def test_no_group_starves_while_another_has_room() -> None:
    """Ten short sequences, then one long one, in a pool with room for either: nobody is preempted."""
    groups = (KVGroup(), *[KVGroup(32)] * 5)
    for lengths in ([30] * 10, [900]):
        scheduler = Scheduler(
            max_num_batched_tokens=512,
            max_num_sequences=10,
            max_model_len=1024,
            blocks=KVBlocks(240, BLOCK_TOKENS, groups=groups),
        )
        for number, length in enumerate(lengths):
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            scheduler.add(Sequence(number, str(number), [number + 1] * length, params, 0))
        while scheduler.has_unfinished:
            step = scheduler.schedule()
            scheduler.update(step, StepOutput(step.step_id, {point.sequence_id: [1] for point in step.sample_points}))
        assert scheduler.num_preemptions == 0
