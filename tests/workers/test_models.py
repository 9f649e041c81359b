"""The decoder and the transformers fallback against transformers' own float32 logits, over a scattered paged cache."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders import decoder
from manta.workers.decoders.decoder import Decoder
from manta.workers.decoders.rope_table import rope_table
from manta.workers.decoders.transformers_model import TransformersModel
from manta.workers.kernels import weights
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.layer_caches import allocate_states, layer_caches
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import one_group
from manta.workers.models.dense import read_rope
from manta.workers.models.model_config import ModelError, RopeConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.platforms import choose_platform
from manta.workers.step import ZERO_STATE, StateUse
from manta.workers.torch_worker.loader import load_model
from tests.checkpoints import checkpoint, reference_greedy, reference_logits
from tests.pairs import in_turns
from tests.workers.cpu_forms import FORMS, TORCH, in_form

BLOCK_SIZE = 16
NUM_BLOCKS = 40
NUM_SLOTS = 20
"""Slots of recurrent states, which steps write in turn; more than four sequences write in two steps."""
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, sharded, with biases": (
        "llama",
        {"tie_word_embeddings": True, "max_shard_size": "50KB", "attention_bias": True, "mlp_bias": True},
    ),
    "llama without grouped queries": ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama, yarn rope with multipliers": (
        "llama",
        {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "llama3 rope, tied": ("llama3", {}),
    "mistral, window of 24": ("mistral", {}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2, tied": ("qwen2", {}),
    "qwen2, windows from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {}),
}
FALCON_ALIBI = {
    "new_decoder_architecture": False,
    "multi_query": False,
    "num_kv_heads": None,
    "alibi": True,
    "parallel_attn": False,
    "bias": True,
    "num_attention_heads": 6,
    "hidden_size": 96,
}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "phi": ("phi", {}),
    "gemma": ("gemma", {}),
    "falcon": ("falcon", {}),
    "falcon, one KV head": ("falcon", {"new_decoder_architecture": False}),
    "falcon, ALiBi": ("falcon", FALCON_ALIBI),
    "bloom": ("bloom", {}),
    "bloom, 6 heads": ("bloom", {"n_head": 6, "hidden_size": 96, "apply_residual_connection_post_layernorm": True}),
    "mpt": ("mpt", {}),
    "mpt, 6 heads": ("mpt", {"n_heads": 6, "d_model": 96, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    "gpt_neo, windows of 24": ("gpt_neo", {}),
    "xglm": ("xglm", {}),
}
ALL = NATIVE | FALLBACK


class Cache:
    """A model with a paged cache of scattered blocks; runs flat batches of (sequence, tokens). `model` is one that was
    loaded from the folder before.
    """

    def __init__(self, folder: pathlib.Path, dtype: str = "float32", model: Model | None = None) -> None:
        self.config = model.config if isinstance(model, Decoder) else load_model_config(folder)
        platform = choose_platform("cpu", None)
        self.model: Model = model or load_model(folder, self.config, dtype, platform)
        layers = one_group(self.config.attends)
        kv = platform.allocate_kv(
            self.config, NUM_BLOCKS, BLOCK_SIZE, platform.torch_dtype(dtype), layers.layers_per_block
        )
        kv.fill_(float("nan"))  # what is read but was not written shows
        states = allocate_states(self.config.states, NUM_SLOTS, platform.device)
        for state in itertools.chain.from_iterable(states):
            state[1:] = float("nan")
        self.kv_caches = layer_caches(kv, layers, states)
        self.slots = [ZERO_STATE] * 4
        """The slot with the state of each sequence; each step writes others."""
        self._free_slots = itertools.cycle(range(1, NUM_SLOTS))
        self.block_tables = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32).reshape(4, -1)
        self.lengths = [0] * 4

    def run(self, *pieces: tuple[int, list[int]]) -> list[torch.Tensor]:
        """Logits [num_tokens, vocab_size] of each piece, all computed in one step."""
        rows = [sequence for sequence, _ in pieces]
        lens = [len(tokens) for _, tokens in pieces]
        starts = np.array([self.lengths[sequence] for sequence in rows])
        tables, states = self.block_tables[rows], self._states(rows, lens)
        metadata = AttentionMetadata.build(QueryTokens(starts, np.array(lens), tables, BLOCK_SIZE, states=states))
        token_ids = torch.tensor([token for _, tokens in pieces for token in tokens])
        logits = self.model.compute_logits(self.model.forward(token_ids, metadata, self.kv_caches))
        for sequence, length in zip(rows, lens, strict=True):
            self.lengths[sequence] += length
        return list(logits.split(lens))

    def _states(self, rows: list[int], lens: list[int]) -> list[StateUse]:
        """Each sequence of more than 4 tokens also writes states inside of them."""
        starts = [self.lengths[row] for row in rows]
        uses = []
        for row, start, length in zip(rows, starts, lens, strict=True):
            positions = {start + length} | ({start + 1, start + length // 2} if length > 4 else set())
            writes = [(position, next(self._free_slots)) for position in sorted(positions)]
            uses.append(StateUse(self.slots[row], writes))
            self.slots[row] = writes[-1][1]
        return uses


def in_two_forms(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each name with the best form of the kernels and with one of the others."""
    return pytest.mark.parametrize(("name", "form"), in_turns(names, FORMS, num_always=1), indirect=["form"])


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every form of the kernels that this processor runs, and torch alone."""
    with in_form(request.param):
        yield request.param


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, count).tolist()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FALLBACK)
def test_logits_through_transformers_equal_its_own(name: str) -> None:
    check_logits(*FALLBACK[name])


@pytest.mark.few(10)
@in_two_forms(NATIVE)
def test_logits_of_chunked_prefill_and_decode_equal_transformers(form: str, name: str) -> None:
    family, options = NATIVE[name]
    assert load_model_config(checkpoint(family, **options)).native
    check_logits(family, options)


def check_logits(family: str, options: dict[str, Any]) -> None:
    folder = checkpoint(family, **options)
    tokens = random_tokens(120)
    cache = Cache(folder)
    pieces = [tokens[:33], tokens[33:40], tokens[40:90], *([token] for token in tokens[90:])]
    logits = torch.cat([cache.run((0, piece))[0] for piece in pieces])
    torch.testing.assert_close(logits, reference_logits(folder, tokens), atol=3e-4, rtol=1e-4)


@pytest.mark.few(5)
@in_two_forms(["llama", "mistral, window of 24", "qwen2, tied", "qwen3", "gpt_neox", "bloom"])
def test_greedy_tokens_of_a_mixed_batch_equal_transformers(form: str, name: str) -> None:
    """A late sequence is prefilled in the steps in which the others decode."""
    family, options = ALL[name]
    folder = checkpoint(family, **options)
    prompts = [random_tokens(37, seed=1), random_tokens(5, seed=2), random_tokens(50, seed=3)]
    outputs: list[list[int]] = [[], [], []]
    cache = Cache(folder)

    def step(*pieces: tuple[int, list[int]]) -> None:
        for (sequence, _), logits in zip(pieces, cache.run(*pieces), strict=True):
            outputs[sequence].append(int(logits[-1].argmax()))

    step((0, prompts[0]), (1, prompts[1]))
    for _ in range(8):
        step((1, outputs[1][-1:]), (0, outputs[0][-1:]))
    cache.run((2, prompts[2][:30]))
    step((2, prompts[2][30:]), (0, outputs[0][-1:]), (1, outputs[1][-1:]))
    while len(outputs[2]) < 20:  # all three cross the end of a block
        step(*((sequence, outputs[sequence][-1:]) for sequence in range(3)))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == reference_greedy(folder, prompt, len(output))


@in_two_forms(["llama", "qwen2, tied", "qwen3", "gpt_neox", "falcon", "mpt"])
def test_bfloat16_stays_near_the_float32_logits(form: str, name: str) -> None:
    family, options = ALL[name]
    folder = checkpoint(family, dtype="bfloat16", **options)
    tokens = random_tokens(40)
    cache = Cache(folder, "bfloat16")
    logits = torch.cat([cache.run((0, tokens[:39]))[0], cache.run((0, tokens[39:]))[0]]).float()
    expected = reference_logits(folder, tokens)
    assert (logits - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@in_two_forms(["llama tied, sharded, with biases", "mistral, window of 24", "qwen2, tied", "qwen3"])
def test_one_call_gives_the_loops_bits(form: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, chunks and decodes in one step, groups over a shared prefix, an MLP in parts."""
    family, options = NATIVE[name]
    folder = checkpoint(family, dtype=dtype, **options)
    itemsize = 2 if dtype == "bfloat16" else 4
    monkeypatch.setattr(weights, "MLP_BYTES", 70 * itemsize * load_model_config(folder).intermediate_size)
    logits = []
    for fuses in (True, False):
        cache = Cache(folder, dtype)
        if form == TORCH:
            assert cache.model.compiled is None  # type: ignore[attr-defined]
            pytest.skip("torch alone has no such call")
        assert cache.model.compiled is not None  # type: ignore[attr-defined]
        if not fuses:
            cache.model.compiled = None  # type: ignore[attr-defined]
        cache.block_tables[1, :6] = cache.block_tables[0, :6]
        of_form = cache.run((0, random_tokens(100)))
        cache.lengths[1] = 96
        of_form += cache.run((0, [7]), (1, random_tokens(3)), (2, random_tokens(80, seed=1)), (3, [1]))
        of_form += cache.run((3, [5]), (0, [8]), (1, [9]), (2, [3]))
        logits.append(torch.cat(of_form))
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


def test_a_wide_mlp_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("llama")
    tokens = random_tokens(100)
    expected = Cache(folder).run((0, tokens))[0]
    monkeypatch.setattr(weights, "MLP_BYTES", 9 * 4 * load_model_config(folder).intermediate_size)
    torch.testing.assert_close(Cache(folder).run((0, tokens))[0], expected, atol=1e-5, rtol=1e-5)


def test_rotary_table_grows_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_FIRST_POSITIONS", 8)
    folder = checkpoint("llama")
    tokens = random_tokens(100)
    cache = Cache(folder)
    logits = torch.cat([cache.run((0, tokens[:5]))[0], cache.run((0, tokens[5:]))[0]])
    torch.testing.assert_close(logits, reference_logits(folder, tokens), atol=3e-4, rtol=1e-4)


def test_the_rotary_table_holds_cosines_and_sines() -> None:
    table = rope_table(RopeConfig(theta=100.0), head_dim=4, num_positions=3)
    angles = np.array([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    np.testing.assert_allclose(table, np.hstack((np.cos(angles), np.sin(angles))), atol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("attention_factor", [None, 0.9])
@pytest.mark.parametrize("multipliers", [(0, 0), (1, 0), (0, 1), (1, 1), (0.707, 1), (1, 0.707)])
def test_yarns_tables_are_those_of_transformers(
    factor: float, attention_factor: float | None, multipliers: tuple[float, float]
) -> None:
    mscale, mscale_all_dim = multipliers
    scaling = {
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "attention_factor": attention_factor,
    }
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=YARN_ROPE | scaling
    )
    inv_freq, expected = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = RopeConfig(rope_type="yarn", original_max_position_embeddings=64, **scaling)  # type: ignore[arg-type]
    table = torch.from_numpy(rope_table(rope, head_dim=16, num_positions=40))
    angles = torch.outer(torch.arange(40), inv_freq)
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), dim=-1) * expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("longest", [40, 64, 65, 200])
def test_tables_for_a_longest_context_are_those_of_transformers(rope_type: str, longest: int) -> None:
    """Around and beyond the original context of 64 positions."""
    lists = {
        "short_factor": [1.0 + index / 4 for index in range(8)],
        "long_factor": [2.0 + index for index in range(8)],
    }
    scaling = (
        DYNAMIC_ROPE if rope_type == "dynamic" else DYNAMIC_ROPE | lists | {"original_max_position_embeddings": 64}
    )
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, rope_parameters=scaling | {"rope_type": rope_type})
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=longest)
    raw = RawConfig(config.to_dict(), "config.json")
    rope = msgspec.structs.replace(read_rope(raw, head_dim=16), longest_context=longest)
    table = torch.from_numpy(rope_table(rope, head_dim=16, num_positions=longest))
    angles = torch.outer(torch.arange(longest), inv_freq)
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), dim=-1) * factor, atol=1e-5, rtol=1e-5)


REFUSED = [
    ("BltConfig", {}, "byte-latent patches"),
    ("ReformerConfig", {"is_decoder": True}, "tokens that hashes of their keys choose"),
    ("XLNetConfig", {}, "a second stream of attention predicts"),
    ("CpmAntConfig", {}, "its prompts attend to later ones"),
    ("ProphetNetConfig", {"is_encoder_decoder": False}, "predicts several tokens at a time"),
    ("BartConfig", {}, "encoder-decoder"),
    ("RoFormerConfig", {}, "attend to later ones unless is_decoder is true"),
    ("XLMConfig", {}, "attend to later ones unless causal is true"),
    ("XLMConfig", {"causal": True, "asm": True}, "adaptive softmax"),
    ("MvpConfig", {"is_encoder_decoder": False, "use_prompt": True}, "learned keys and values"),
    ("TrOCRConfig", {"use_learned_position_embeddings": False}, "positions that padding shifts"),
    ("DoryConfig", {"recurrent_kv_cache_mode": "last_loop"}, "how a prompt is cut into steps"),
    ("FalconConfig", {"alibi": True}, "ALiBi over key heads that queries share"),
    ("FalconConfig", {"rope_parameters": DYNAMIC_ROPE}, "rope type 'dynamic'"),
    ("MptConfig", {"attn_config": {"qk_ln": True}}, "transformers does not compute its attn_config.qk_ln: True"),
    ("MptConfig", {"logit_scale": 0.5}, "transformers does not compute its logit_scale: 0.5"),
    ("MptConfig", {"attn_config": {"alibi": False}}, "transformers does not compute its attn_config.alibi: False"),
    ("T5Config", {"architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
    ("LlamaConfig", {"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
    ("GPTNeoXConfig", {"rope_parameters": DYNAMIC_ROPE}, "rope type 'dynamic'"),
]


@pytest.mark.parametrize(("class_name", "options", "reason"), REFUSED)
def test_what_cannot_run_is_refused_with_its_reason(
    class_name: str, options: dict[str, Any], reason: str, tmp_path: pathlib.Path
) -> None:
    config = getattr(transformers, class_name)(**options)
    if not config.architectures:
        mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        config.architectures = [mapping[type(config)].__name__]  # type: ignore[attr-defined]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model_config(tmp_path)
    assert config.architectures[0] in str(caught.value)


def test_mpt_is_known_by_its_own_name(tmp_path: pathlib.Path) -> None:
    transformers.MptConfig(architectures=["MPTForCausalLM"], max_seq_len=300).save_pretrained(tmp_path)
    assert load_model_config(tmp_path).max_position_embeddings == 300


def test_an_architecture_unknown_to_transformers_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NovelLM"], "model_type": "novel"}))
    with pytest.raises(ModelError, match="NovelLM is not supported"):
        load_model_config(tmp_path)


def test_a_non_causal_model_is_refused_at_load(tmp_path: pathlib.Path) -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    model_config = load_model_config(tmp_path)
    with pytest.raises(ModelError, match=r"^Bert\w+ is not supported"):
        load_model(tmp_path, model_config, "float32", choose_platform("cpu", None))


def with_tensor(folder: pathlib.Path, to: pathlib.Path, name: str) -> pathlib.Path:
    """A copy of a checkpoint with one more tensor."""
    shutil.copytree(folder, to)
    tensors = safetensors.torch.load_file(to / "model.safetensors")
    safetensors.torch.save_file(tensors | {name: torch.ones(64)}, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_stored_weight_that_transformers_would_leave_out_is_refused(tmp_path: pathlib.Path) -> None:
    folder = with_tensor(checkpoint("gemma"), tmp_path / "model", "model.layers.1.self_attn.q_proj.bias")
    with pytest.raises(ModelError, match=r"a bias of model\.layers\.1\.self_attn\.q_proj, which transformers would"):
        Cache(folder)


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("model.vision.weight", ["model.vision.weight"]),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", []),
        ("model.layers.3.mlp.novel", ["model.layers.3.mlp.novel"]),  # beyond the three layers: of a draft head
    ],
)
def test_stored_tensors_of_no_part_of_the_model_are_named(name: str, unused: list[str], tmp_path: pathlib.Path) -> None:
    model = Cache(with_tensor(checkpoint("gemma"), tmp_path / "model", name)).model
    assert isinstance(model, TransformersModel)
    assert model.unused_tensors == unused
