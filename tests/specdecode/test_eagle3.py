"""EAGLE-3 heads: their logits and drafts are those of the formula, and no draft changes a token, however the engine
came to its cache. What is no such head, or one of another model, is refused before the engine starts.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from manta.cluster.cli.check import check_quickly, run_check
from manta.cluster.config import EngineConfig
from manta.cluster.engine.request import EngineRequest
from manta.cluster.llm import LLM, SamplingParams
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.checkpoints.draft_tokens import eagle3_head
from manta.workers.checkpoints.memory import choose_groups
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.layer_caches import allocate_hidden, allocate_states, draft_head_caches, layer_caches
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import most_states, one_group
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.platforms import choose_platform
from manta.workers.step import NUM_FIXED_STATES
from manta.workers.torch_worker.head_loader import load_eagle3_head
from manta.workers.torch_worker.loader import load_model
from tests.checkpoints import checkpoint, reference_model
from tests.conftest import PROVE
from tests.eagle3_heads import FORMS, Eagle3Formula, eagle3_folder, tensors_of, write_eagle3
from tests.engine.histories import BLOCK, GREEDY, prompts
from tests.engine_parts import speculative_worker_of
from tests.specdecode.test_draft_heads import HISTORIES, drafts_of, quick, run
from tests.workers.test_layer_kinds import CASES, folder_of
from tests.workers.test_models import random_tokens

NUM_TOKENS = 60
CHOSEN = {7: 100.0, 8: 100.0, 9: 100.0}
"""A bias after which model and head draw one of three tokens, so that drafts are accepted."""
BIASED = msgspec.structs.replace(GREEDY, logit_bias=CHOSEN)
BIASED_TEXTS = [random_tokens(40)[start:] for start in (0, 3, 7, 20)]


def llama() -> pathlib.Path:
    return checkpoint("llama", dtype="float32")


def eagle3(name: str = "SpecForge", **fields: Any) -> dict[str, Any]:
    options = {"proposers": ["eagle3"], "draft_model": str(eagle3_folder(name)), "max_draft_tokens": 3}
    return options | {"adaptive": False} | fields


# ---- the formula -----------------------------------------------------------------------------------------------------


def tapped(folder: pathlib.Path, taps: tuple[int, ...], tokens: list[int], dtype: str = "float32") -> list[Any]:
    """The final hidden states and the streams of a model that gives out some, after a prompt in one chunk."""
    platform = choose_platform("cpu", 1)
    config = msgspec.structs.replace(load_model_config(folder), taps=taps)
    model = load_model(folder, config, dtype, platform)
    assert isinstance(model, Decoder)
    num_blocks, layers = -(-len(tokens) // BLOCK), one_group(config.attends)
    own = torch.float32 if dtype == "float32" else torch.bfloat16
    cache = platform.allocate_kv(config, num_blocks, BLOCK, own, layers.layers_per_block)
    states = allocate_states(config.states, NUM_FIXED_STATES, platform.device)
    metadata = platform.build_metadata(QueryTokens.measuring(len(tokens), BLOCK, bool(config.state_bytes)))
    with torch.inference_mode():
        return list(model.forward_tapped(torch.tensor(tokens), metadata, layer_caches(cache, layers, states)))


KINDS = ("qwen3_next", "deepseek_v3", "gemma4", "mixtral", "minimax", "zamba2", "cohere2")


@pytest.mark.parametrize("kind", quick(("llama", *KINDS), "llama"))
def test_streams_are_the_hidden_states_of_transformers(kind: str) -> None:
    folder = llama() if kind == "llama" else folder_of(kind)
    tokens, taps = random_tokens(40), (0, 1, 2)
    hidden, streams = tapped(folder, taps, tokens)
    with torch.inference_mode():
        model = reference_model(folder).model
        expected = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    for tap, found in zip(taps, streams.chunk(len(taps), dim=-1), strict=True):
        wanted = expected.hidden_states[tap][0]
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max(), tap
    assert (hidden - expected.last_hidden_state[0]).abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_taps_change_no_bit_of_what_the_model_computes(dtype: str) -> None:
    tokens = random_tokens(24)
    plain, nothing = tapped(llama(), (), tokens, dtype)
    for taps in ((0, 3), (1, 2)):
        hidden, streams = tapped(llama(), taps, tokens, dtype)
        assert torch.equal(hidden, plain)
        assert streams.shape == (24, 2 * 64)
    assert nothing.shape == (24, 0)


def heads_logits(name: str, folder: pathlib.Path, tokens: list[int]) -> torch.Tensor:
    """The logits of a head after each of `tokens` but the first, in chunks, over scattered blocks."""
    platform, config = choose_platform("cpu", 1), load_model_config(folder)
    own = eagle3_head(eagle3_folder(name), config)
    assert own.eagle3 is not None
    head = load_eagle3_head(eagle3_folder(name), own, (folder, config), "float32", platform)
    _, streams = tapped(folder, own.eagle3.taps, tokens[:-1])
    table = np.random.default_rng(0).permutation(8).astype(np.int32)[None]
    kept = allocate_hidden(own.hidden_size, 8, BLOCK, torch.float32, platform.device)
    caches = draft_head_caches(platform.allocate_kv(own, 8, BLOCK, torch.float32), kept)
    found, start = [], 0
    with torch.inference_mode():
        fused = head.fuse(streams)
        padded = torch.nn.functional.pad(fused, (0, 0, 0, 8 * BLOCK - len(fused)))
        kept[0, 0, torch.from_numpy(table[0].astype(np.int64))] = padded.view(8, BLOCK, -1)
        for count in (33, 7, *[1] * (len(fused) - 40)):
            step = AttentionMetadata.build(QueryTokens(np.array([start]), np.array([count]), table, BLOCK))
            next_tokens = torch.tensor(tokens[start + 1 : start + 1 + count])
            found.append(head.compute_logits(head.forward(next_tokens, step, caches)))
            start += count
    return torch.cat(found)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_formula_in_numpy(name: str) -> None:
    tokens, formula = random_tokens(NUM_TOKENS), Eagle3Formula(name, llama())
    wanted = formula.logits(formula.states(formula.fused(tokens[:-1]), tokens[1:]))
    logits = heads_logits(name, llama(), tokens).double().numpy()
    others = np.setdiff1d(np.arange(logits.shape[1]), formula.ids)
    assert np.isneginf(logits[:, others]).all()
    own = wanted[:, formula.ids]
    assert np.abs(logits[:, formula.ids] - own).max() <= 1e-4 * (own.max() - own.min())
    assert (logits.argmax(-1) == wanted.argmax(-1)).all()


# ---- drafts in the engine --------------------------------------------------------------------------------------------


def make_llm(folder: pathlib.Path, name: str = "SpecForge", num_blocks: int = 64, **options: Any) -> LLM:
    """An engine whose cache has `num_blocks` blocks for each group of layers."""
    config, num_sequences = load_model_config(folder), 8
    own = eagle3_head(eagle3_folder(name), config)
    layers = choose_groups(config, own)
    num_bytes = layers.layers_per_block * config.layer_bytes_per_token("float32")
    num_bytes += own.layer_bytes_per_token("float32") + 4 * own.hidden_size
    num_slots = NUM_FIXED_STATES + num_sequences * most_states(0, has_drafts=True)
    num_bytes = num_slots * config.state_bytes + num_blocks * len(layers.groups) * BLOCK * num_bytes
    defaults = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": num_bytes, "max_num_sequences": num_sequences}
    defaults |= {"typical_sequence_tokens": 1, "speculative": eagle3(name)}
    return LLM(str(folder), **(defaults | options))


def plain(folder: pathlib.Path) -> LLM:
    """An engine without drafts, whose tokens other tests compare with transformers'."""
    return LLM(str(folder), dtype="float32", num_threads=1)


@functools.cache
def greedy(folder: pathlib.Path) -> list[list[int]]:
    return run(plain(folder))


@functools.cache
def biased() -> list[list[int]]:
    return run(plain(llama()), BIASED, BIASED_TEXTS)


@pytest.mark.parametrize("history", quick(HISTORIES, "preempted"))
@pytest.mark.parametrize("name", quick(FORMS, "SpecForge"))
def test_no_draft_changes_a_token_and_drafts_are_those_of_the_formula(name: str, history: str) -> None:
    """The drafts of texts that begin alike are others where these part, inside of a block."""
    llm, formula, texts = make_llm(llama(), name, **HISTORIES[history]), Eagle3Formula(name, llama()), prompts()[:3]
    seen = drafts_of(llm)
    assert run(llm, texts=texts) == greedy(llama())[:3]
    hits, num_first = llm.engine.stats().prefix_cache_hits, len(seen)
    assert run(llm, texts=texts) == greedy(llama())[:3], "from cached prefixes"
    assert llm.engine.stats().prefix_cache_hits > hits
    num_greedy = len(seen)
    assert min(num_first, num_greedy - num_first) > 20
    assert run(llm, BIASED, BIASED_TEXTS) == biased()
    for index, (tokens, drafts) in enumerate(seen):
        if index % (2 if PROVE else 8) == 0:
            assert drafts == formula.drafts(tokens, len(drafts), CHOSEN if index >= num_greedy else None)
    assert run(llm) == greedy(llama())
    stats = llm.engine.stats()
    assert bool(stats.num_preemptions) == (history == "preempted")
    assert sum(stats.drafts.accepted["eagle3"]) > 5
    assert len(stats.drafts.drafted["eagle3"]) == 3


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3", "mixtral", "gemma4", "zamba2"])
def test_heads_of_models_with_other_layers(kind: str) -> None:
    """Those with windows give back blocks, and those with states take them back after rejected drafts."""
    for history in HISTORIES.values():
        llm = make_llm(folder_of(kind), **history)
        for _ in range(2):
            assert run(llm) == greedy(folder_of(kind))
        assert sum(llm.engine.stats().drafts.drafted["eagle3"]) > 100


def test_seeded_choices_are_those_without_drafts() -> None:
    params = SamplingParams(n=3, seed=3, temperature=0.8, top_p=0.9, max_tokens=16, ignore_eos=True, logit_bias=CHOSEN)
    llm = make_llm(llama())
    assert run(llm, params) == run(plain(llama()), params)
    assert sum(llm.engine.stats().drafts.accepted["eagle3"]) > 20


@pytest.mark.prove
@pytest.mark.parametrize("options", [{"weights": "int8"}, {"kv_cache_dtype": "int8"}], ids=["weights", "cache"])
def test_a_head_is_rounded_like_its_model(options: dict[str, Any]) -> None:
    common = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 1 << 22}
    wanted = run(LLM(str(llama()), **common, **options))
    assert run(LLM(str(llama()), **common, **options, speculative=eagle3())) == wanted


def test_adaptive_lengths_stop_what_does_not_pay() -> None:
    llm = make_llm(llama(), speculative=eagle3(adaptive=True))
    assert run(llm) == greedy(llama())


def test_a_head_reads_what_is_kept_since_its_drafts_are_wanted_again() -> None:
    """Meanwhile steps keep nothing for it. No token changes, and another request reads no block without states."""
    llm, formula, text = make_llm(llama()), Eagle3Formula("SpecForge", llama()), prompts()[0]
    params = msgspec.structs.replace(GREEDY, max_tokens=64)
    worker, seen = speculative_worker_of(llm.engine), drafts_of(llm)
    (head,), states = worker.chain.proposers, worker.target.runner.hidden_states
    tokens, first, before = list(text), 0, states.clone()
    llm.engine.add_request(EngineRequest(request_id="0", prompt_token_ids=text, params=params))
    for number in itertools.count():
        if number == 4:
            head.wanted, before = False, states.clone()
        if number == 8:
            assert torch.equal(states, before)
            head.wanted, first = True, -(-(len(tokens) - 1) // BLOCK) * BLOCK
            seen.clear()
        deltas = llm.engine.step()
        tokens += [token for delta in deltas for token in delta.token_ids]
        if any(delta.finish for delta in deltas):
            break
    assert tokens == [*text, *run(plain(llama()), params, [text])[0]]
    assert len(seen) > 8
    for known, drafts in seen[::6]:
        assert drafts == formula.drafts(known, len(drafts), first=first)
    seen.clear()
    assert run(llm, texts=[tokens[:-4]]) == run(plain(llama()), texts=[tokens[:-4]])
    assert llm.engine.stats().prefix_cache_hits > first
    for known, drafts in seen[:2]:
        assert any(drafts == formula.drafts(known, len(drafts), first=each) for each in (first, first + BLOCK))


# ---- what is read, and what is refused -------------------------------------------------------------------------------


def changed(tmp_path: pathlib.Path, name: str, keys: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> str:
    tensors = tensors_of(FORMS[name])
    change(tensors)
    return str(write_eagle3(tmp_path / "head", FORMS[name].config | keys, tensors))


def nothing(tensors: dict[str, Any]) -> None:
    pass


def narrow(tensors: dict[str, Any]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()


def far(tensors: dict[str, Any]) -> None:
    tensors["d2t"][-1] = 320


def twice(tensors: dict[str, Any]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


DAMAGED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any], str]] = {
    "another kind": ({"architectures": ["LlamaForCausalLM"]}, nothing, "architectures"),
    "another width": ({"hidden_size": 128}, nothing, "hidden_size must be 64, the hidden size of its model"),
    "another vocabulary": ({"vocab_size": 400}, nothing, "vocab_size must be 320, the vocabulary of its model"),
    "more drafts than tokens": ({"draft_vocab_size": 321}, nothing, "draft_vocab_size"),
    "layers beyond the last": ({"eagle_aux_hidden_state_layer_ids": [1, 4]}, nothing, "of the 3 layers of its model"),
    "layers in another order": ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, nothing, "ascending"),
    "no layers of a small model": ({"eagle_config": None}, nothing, "fewer than 7"),
    "final hidden states": ({"eagle_config": {"use_aux_hidden_state": False}}, nothing, "use_aux_hidden_state"),
    "two layers": ({"num_hidden_layers": 2}, nothing, "num_hidden_layers must be 1"),
    "norms of another kind": ({"fc_norm": True}, nothing, "fc_norm must be false"),
    "no table of tokens": ({}, lambda tensors: tensors.pop("d2t"), "tensor d2t .*is missing"),
    "a short table": ({}, lambda tensors: tensors.update(d2t=tensors["d2t"][1:]), "tensor d2t has shape"),
    "a token out of range": ({}, far, "d2t makes token 519 of the head's token 199, and the model has 320 tokens"),
    "a token twice": ({}, twice, "d2t makes one token of several"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_heads_are_refused_before_anything_starts(damage: str, tmp_path: pathlib.Path) -> None:
    keys, change, words = DAMAGED[damage]
    speculative = SpeculativeConfig(proposers=("eagle3",), draft_model=changed(tmp_path, "SpecForge", keys, change))
    with pytest.raises(ModelError, match=words):
        check_quickly(EngineConfig(model=str(llama()), speculative=speculative))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (narrow, "tensor fc.weight has shape"),
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), "tensor midlayer.hidden_norm.weight .*is missing"),
        (lambda tensors: tensors.update({"mask_hidden": torch.zeros(1, 64)}), "does not have: mask_hidden"),
    ],
    ids=["width", "missing", "unknown"],
)
def test_a_damaged_tensor_is_named_by_the_check_and_the_engine(change: Any, words: str, tmp_path: pathlib.Path) -> None:
    options = {"proposers": ["eagle3"], "draft_model": changed(tmp_path, "SpecForge", {}, change)}
    with pytest.raises(ModelError, match=words):
        LLM(str(llama()), speculative=options)
    engine = EngineConfig(model=str(llama()), speculative=msgspec.convert(options, SpeculativeConfig))
    assert run_check(None, {"engine": msgspec.to_builtins(engine)}) == 1


def test_a_head_is_no_model_and_a_model_no_head() -> None:
    head = str(eagle3_folder())
    with pytest.raises(ModelError, match="LlamaForCausalLMEagle3 is not supported"):
        load_model_config(head)
    with pytest.raises(ModelError, match="LlamaForCausalLMEagle3 is not supported"):
        LLM(str(llama()), speculative={"proposers": ["draft"], "draft_model": head})
    with pytest.raises(ConfigError) as raised:
        LLM(str(llama()), speculative={"proposers": ["eagle3"], "draft_model": str(llama())})
    assert raised.value.key == "architectures"
    for fields in ({"proposers": ("eagle3",)}, {"proposers": ("eagle3", "draft"), "draft_model": "x"}):
        with pytest.raises(ValueError, match="eagle3"):
            SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (lambda: checkpoint("gpt_neox", dtype="float32"), "runs through transformers"),
        (lambda: folder_of("gemma3n"), "several residual streams"),
        (lambda: folder_of("longcat_flash"), "added a layer later"),
    ],
    ids=["transformers", "streams", "shortcut"],
)
def test_models_without_one_stream_are_refused(folder: Callable[[], pathlib.Path], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        eagle3_head(eagle3_folder(), load_model_config(folder()))


def test_a_tpu_refuses_heads() -> None:
    speculative = SpeculativeConfig(proposers=("eagle3",), draft_model=str(eagle3_folder()))
    with pytest.raises(ModelError, match="device tpu does not compute draft heads"):
        check_quickly(EngineConfig(model=str(llama()), device="tpu", speculative=speculative))


def taps_of(keys: dict[str, Any], target: ModelConfig, tmp_path: pathlib.Path) -> tuple[int, ...]:
    (tmp_path / "config.json").write_text(json.dumps(FORMS["SpecForge"].config | {"eagle_config": None} | keys))
    (tmp_path / "model.safetensors").write_bytes((eagle3_folder() / "model.safetensors").read_bytes())
    head = eagle3_head(tmp_path, target)
    assert head.eagle3 is not None
    return head.eagle3.taps


def test_layers_are_named_as_inputs_or_in_another_object_as_outputs(tmp_path: pathlib.Path) -> None:
    """vLLM reads the first form, SGLang the second, and both take the paper's layers without either."""
    target = load_model_config(checkpoint("llama", dtype="float32", num_hidden_layers=32))
    named = {"eagle_aux_hidden_state_layer_ids": [1, 14, 27]}
    assert taps_of({}, target, tmp_path) == (2, 16, 29)
    assert taps_of(named, target, tmp_path) == (1, 14, 27)
    assert taps_of({"eagle_config": named}, target, tmp_path) == (2, 15, 28)
    assert taps_of({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, target, tmp_path) == (2, 16, 29)


@pytest.mark.usefixtures("trials_here")
def test_a_check_counts_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for speculative in ({}, {"speculative": eagle3()}):
        engine = {"model": str(llama()), "device": "cpu", "dtype": "float32", "kv_cache_bytes": 1 << 24}
        assert run_check(None, {"engine": engine | speculative}) == 0
        rows.append({line[:13].rstrip(): line[14:] for line in capsys.readouterr().out.splitlines()})
    assert rows[0]["KV cache"] != rows[1]["KV cache"]


def test_every_kind_of_layer_is_named() -> None:
    assert set(KINDS) <= set(CASES)
