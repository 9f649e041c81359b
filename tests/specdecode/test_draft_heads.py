"""Draft heads inside checkpoints: their logits and drafts are those of the published formula, and no draft changes a
token, however the engine came to its cache.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from manta.cluster.cli.check import check_quickly, run_check
from manta.cluster.config import EngineConfig
from manta.cluster.llm import LLM, SamplingParams
from manta.cluster.text.tokenizer import Tokenizer
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.checkpoints.memory import choose_groups
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.checkpoints.stored_draft_head import stored_draft_head
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels import build
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.layer_caches import allocate_hidden, draft_head_caches
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import most_states
from manta.workers.models.draft_heads import draft_head_config
from manta.workers.models.model_config import ModelError
from manta.workers.platforms import choose_platform
from manta.workers.step import NUM_FIXED_STATES
from manta.workers.torch_worker.head_loader import load_draft_head
from manta.workers.torch_worker.loader import load_model
from tests.checkpoints import checkpoint, make_tokenizer, on_one_thread
from tests.conftest import PROVE
from tests.draft_heads import (
    HEADS,
    OF_QWEN,
    Formula,
    folder_with_head,
    formula_of,
    head_names,
    layer_model,
    normed,
    write_head,
)
from tests.engine.histories import BLOCK, GREEDY, prompts
from tests.engine.test_kept_prefixes import end
from tests.engine_parts import speculative_worker_of
from tests.families.test_perplexity import pieces
from tests.workers.recurrent_cases import ROPE
from tests.workers.test_layer_kinds import CASES, SIZES, folder_of
from tests.workers.test_models import random_tokens


def quick(values: Iterable[str], *always: str) -> list[Any]:
    """Makes parameters of all values. `make test` runs those in `always`."""
    return [pytest.param(each, marks=[] if each in always else pytest.mark.prove) for each in values]


MTP: dict[str, Any] = {"proposers": ["mtp"], "max_draft_tokens": 3, "adaptive": False}
NUM_TOKENS = 60


# ---- the formula, in numpy -------------------------------------------------------------------------------------------


def rotated(x: np.ndarray, width: int, neighbours: bool = False) -> np.ndarray:
    """Rotates the first `width` dimensions of heads [num_tokens, num_heads, head_dim]: halves with each other, or
    neighbours, which leaves them in another order.
    """
    turned, rest = x[..., :width], x[..., width:]
    angles = np.arange(len(x))[:, None, None] * ROPE["rope_theta"] ** (-np.arange(0, width, 2) / width)
    first, second = turned[..., : width // 2], turned[..., width // 2 :]
    if neighbours:
        first, second = turned[..., ::2], turned[..., 1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention over heads [num_tokens, num_heads, head_dim], as rows [num_tokens, num_heads * value_dim]."""
    scores = np.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    scores = np.where(np.tri(len(query), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class NumpyLayer:
    """The tensors of a head's layer and its last norm."""

    def __init__(self, kind: str, folder: pathlib.Path) -> None:
        stored = load_file(folder / "model.safetensors")
        self._tensors = {name: each.double().numpy() for name, each in stored.items()}
        self.config = json.loads((folder / "config.json").read_text())
        self._names, self._shift = head_names(kind), int(kind in OF_QWEN)

    def of(self, name: str) -> np.ndarray:
        return np.asarray(self._tensors[f"{self._names['layer']}{name}"])

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self.of(f"{name}.weight").T)

    def norm(self, x: np.ndarray, name: str, shift: int | None = None) -> np.ndarray:
        shift = self._shift if shift is None else shift
        return normed(x, shift + self.of(f"{name}.weight"), self.config["rms_norm_eps"])

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(gate * sigmoid(gate) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def last_norm(self, x: np.ndarray) -> np.ndarray:
        weight = self._shift + self._tensors[f"{self._names['final_norm']}.weight"]
        return normed(x, np.asarray(weight), self.config["rms_norm_eps"])


class Qwen(NumpyLayer):
    """Attention with a gate, and positions in a quarter of each head."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        head_dim = self.config["head_dim"]
        h = self.norm(x, "input_layernorm")
        query, gate = np.split(self.linear(h, "self_attn.q_proj").reshape(len(x), -1, 2 * head_dim), 2, axis=-1)
        key, value = (self.linear(h, f"self_attn.{name}_proj").reshape(len(x), -1, head_dim) for name in "kv")
        query, key = self.norm(query, "self_attn.q_norm"), self.norm(key, "self_attn.k_norm")
        query, key = (rotated(each, head_dim // 4) for each in (query, key))
        key, value = (np.repeat(each, query.shape[1] // each.shape[1], axis=1) for each in (key, value))
        result = attended(query, key, value) * sigmoid(gate.reshape(len(x), -1))
        x = x + self.linear(result, "self_attn.o_proj")
        return self.last_norm(x + self.mlp(self.norm(x, "post_attention_layernorm"), "mlp"))


class DeepSeek(NumpyLayer):
    """Latent attention, and experts in groups, which sigmoids with a bias choose."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        config, heads = self.config, self.config["num_attention_heads"]
        plain, turned, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        h = self.norm(x, "input_layernorm")
        query = self.norm(self.linear(h, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
        query = self.linear(query, "self_attn.q_b_proj").reshape(len(x), heads, -1)
        cached = self.linear(h, "self_attn.kv_a_proj_with_mqa")
        latent = self.norm(cached[:, :rank], "self_attn.kv_a_layernorm")
        expanded = self.linear(latent, "self_attn.kv_b_proj").reshape(len(x), heads, -1)
        shared = rotated(cached[:, None, rank:], turned, neighbours=True).repeat(heads, axis=1)
        key = np.concatenate((expanded[..., :plain], shared), axis=-1)
        query = np.concatenate((query[..., :plain], rotated(query[..., plain:], turned, neighbours=True)), axis=-1)
        x = x + self.linear(attended(query, key, expanded[..., plain:]), "self_attn.o_proj")
        h = self.norm(x, "post_attention_layernorm")
        return self.last_norm(x + self._experts(h) + self.mlp(h, "mlp.shared_experts"))

    def _experts(self, h: np.ndarray) -> np.ndarray:
        config = self.config
        scores = sigmoid(self.linear(h, "mlp.gate"))
        biased = scores + self.of("mlp.gate.e_score_correction_bias")
        result = np.zeros_like(h)
        for row, (own, choice) in enumerate(zip(scores, biased, strict=True)):
            groups = choice.reshape(config["n_group"], -1)
            best = np.sort(groups, axis=-1)[:, -2:].sum(-1).argsort()[-config["topk_group"] :]
            allowed = np.full_like(groups, -np.inf)
            allowed[best] = groups[best]
            chosen = allowed.ravel().argsort()[-config["num_experts_per_tok"] :]
            shares = own[chosen] / own[chosen].sum() * config["routed_scaling_factor"]
            for expert, share in zip(chosen, shares, strict=True):
                result[row] += share * self.mlp(h[row], f"mlp.experts.{expert}")
        return result


IN_NUMPY: dict[str, tuple[type[Qwen] | type[DeepSeek], dict[str, Any]]] = {
    "qwen3_5": (Qwen, {}),
    "deepseek_v3": (DeepSeek, {"rope_parameters": ROPE, "attention_bias": False}),
}
"""The whole head in numpy, and changes of the configuration without which there would be more to write."""


def logits_of_head(folder: pathlib.Path, hidden: np.ndarray, tokens: list[int]) -> torch.Tensor:
    """The logits of a head after each of `tokens` but the first, in chunks, over scattered blocks."""
    platform = choose_platform("cpu", 1)
    config = load_model_config(folder)
    target = load_model(folder, config, "float32", platform)
    assert isinstance(target, Decoder)
    own, head = draft_head_config(config), load_draft_head(folder, config, "float32", platform, target.weights)
    table = np.random.default_rng(0).permutation(8).astype(np.int32)[None]
    states = allocate_hidden(config.hidden_size, 8, BLOCK, torch.float32, platform.device)
    caches = draft_head_caches(platform.allocate_kv(own, 8, BLOCK, torch.float32), states)
    padded = np.pad(hidden, ((0, 8 * BLOCK - len(hidden)), (0, 0)))
    states[0, 0, torch.from_numpy(table[0].astype(np.int64))] = torch.from_numpy(padded).view(8, BLOCK, -1)
    found, start = [], 0
    for count in (33, 7, *[1] * (len(hidden) - 40)):
        step = AttentionMetadata.build(QueryTokens(np.array([start]), np.array([count]), table, BLOCK))
        with torch.inference_mode():
            next_tokens = torch.tensor(tokens[start + 1 : start + 1 + count])
            found.append(head.compute_logits(head.forward(next_tokens, step, caches)))
        start += count
    return torch.cat(found)


def check_logits(formula: Formula, folder: pathlib.Path) -> None:
    tokens = random_tokens(NUM_TOKENS)
    hidden = formula.hidden(tokens[:-1])
    wanted = torch.from_numpy(formula.logits(formula.states(hidden, tokens[1:]))).float()
    logits = logits_of_head(folder, hidden, tokens)
    assert (logits - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("kind", IN_NUMPY)
def test_logits_are_those_of_the_formula_in_numpy(kind: str) -> None:
    block, changes = IN_NUMPY[kind]
    folder = folder_with_head(kind, **changes)
    check_logits(formula_of(kind, block(kind, folder), **changes), folder)


@pytest.mark.parametrize("kind", quick(HEADS, "qwen3_next", "glm4_moe", "mimo_v2"))
def test_logits_are_those_of_the_formula_around_a_layer_of_transformers(kind: str) -> None:
    check_logits(formula_of(kind), folder_with_head(kind))


# ---- drafts in the engine --------------------------------------------------------------------------------------------


def make_llm(kind: str, num_blocks: int = 64, num_sequences: int = 8, **options: Any) -> LLM:
    """An engine whose cache has `num_blocks` blocks for each group of layers, and states for `num_sequences`
    sequences.
    """
    folder = folder_with_head(kind)
    config = load_model_config(folder)
    layers, own = choose_groups(config, None), draft_head_config(config)
    num_bytes = layers.layers_per_block * config.layer_bytes_per_token("float32") + 4 * config.hidden_size
    num_bytes += own.layer_bytes_per_token("float32")
    num_slots = NUM_FIXED_STATES + num_sequences * most_states(0, has_drafts=True)
    num_blocks *= len(layers.groups)
    num_bytes = num_slots * config.state_bytes + num_blocks * BLOCK * num_bytes
    defaults = {
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache_bytes": num_bytes,
        "max_num_sequences": num_sequences,
        "typical_sequence_tokens": 1,
        "speculative": MTP,
    }
    llm = LLM(str(folder), **(defaults | options))
    assert llm.engine.stats().num_blocks == num_blocks
    return llm


def run(llm: LLM, params: SamplingParams = GREEDY, texts: list[list[int]] | None = None) -> list[list[int]]:
    outputs = llm.generate(texts or prompts(), params, use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    return [choice.token_ids for output in outputs for choice in output.outputs]


@functools.cache
def plain(kind: str) -> list[list[int]]:
    """The tokens without drafts, which other tests compare with transformers'."""
    return run(LLM(str(folder_of(kind)), dtype="float32", num_threads=1))


def drafts_of(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """A list that gets each sequence's tokens and what is drafted after them."""
    (proposer,) = speculative_worker_of(llm.engine).chain.proposers
    propose, seen = proposer.propose, []

    def watched(requests: list[Any]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = propose(requests)
        states = {each.sequence_id: each.state for each in requests}
        for sequence_id, drafts in found.items():
            state = states[sequence_id]
            seen.append((state.tokens[: state.num_tokens].tolist(), drafts))
        return found

    proposer.propose = watched
    return seen


HISTORIES: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 11},
    "preempted": {"num_blocks": 8, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("kind", quick(HEADS, "qwen3_next", "deepseek_v3", "mimo_v2"))
def test_no_draft_changes_a_token(kind: str) -> None:
    for history in HISTORIES if PROVE else [list(HISTORIES)[HEADS.index(kind) % len(HISTORIES)]]:
        check_tokens(kind, history)


def check_tokens(kind: str, history: str) -> None:
    llm = make_llm(kind, **HISTORIES[history])
    expected = plain(kind)
    assert run(llm) == expected
    hits = llm.engine.stats().prefix_cache_hits
    assert run(llm) == expected, "from cached prefixes"
    stats = llm.engine.stats()
    assert stats.prefix_cache_hits > hits
    assert bool(stats.num_preemptions) == (history == "preempted")
    assert sum(stats.drafts.drafted["mtp"]) > 100
    assert len(stats.drafts.drafted["mtp"]) == MTP["max_draft_tokens"]


@pytest.mark.parametrize("history", list(HISTORIES)[:2])
@pytest.mark.parametrize("kind", quick(("qwen3_next", "deepseek_v3", "mimo_v2"), "deepseek_v3"))
def test_drafts_are_those_of_the_formula(kind: str, history: str) -> None:
    """They are so after a hit in the prefix cache too, whether or not the head has computed what was found."""
    texts, formula = prompts()[1:3], formula_of(kind)
    llm = make_llm(kind, **HISTORIES[history])
    worker = speculative_worker_of(llm.engine)
    (proposer,) = worker.chain.proposers
    propose, proposer.propose = proposer.propose, lambda requests: {}
    run(llm, texts=texts)
    proposer.propose = propose
    seen = drafts_of(llm)
    for num_choices in (1, 1, 2):  # two choices share blocks, and one copies the last
        del seen[:]
        hits = llm.engine.stats().prefix_cache_hits
        run(llm, msgspec.structs.replace(GREEDY, n=num_choices), texts)
        assert llm.engine.stats().prefix_cache_hits > hits
        assert len(seen) > 10
        for tokens, drafts in seen[:: 4 if PROVE else 16]:
            assert drafts == formula.drafts(tokens, len(drafts))


@pytest.mark.parametrize("kind", quick(("qwen3_5", "deepseek_v3"), "qwen3_5"))
def test_seeded_choices_are_those_without_drafts(kind: str) -> None:
    params = SamplingParams(n=3, seed=3, temperature=0.8, top_p=0.9, max_tokens=20, ignore_eos=True)
    llm = make_llm(kind)
    assert run(llm, params) == run(LLM(str(folder_of(kind)), dtype="float32", num_threads=1), params)
    assert sum(llm.engine.stats().drafts.drafted["mtp"]) > 100


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"kv_cache_dtype": "int8"}], ids=["weights", "cache"])
def test_a_head_is_rounded_like_its_model(options: dict[str, Any]) -> None:
    texts = prompts()[:2]
    common = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 1 << 22}
    wanted = run(LLM(str(folder_of("glm4_moe")), **common, **options), texts=texts)
    llm = LLM(str(folder_with_head("glm4_moe")), **common, **options, speculative=MTP)
    assert run(llm, texts=texts) == wanted
    assert sum(llm.engine.stats().drafts.drafted["mtp"]) > 60


def test_a_head_reads_zeros_in_blocks_of_the_prefix_store(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load_library()  # from the cache that all tests share
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    kind, text = "deepseek_v3", prompts()[2]
    llm = make_llm(kind, prefix_store_bytes=1 << 24)
    for _ in range(2):  # a block is kept when it is found
        assert run(llm, texts=[text]) == [plain(kind)[2]]
    del llm
    end()
    llm = make_llm(kind, prefix_store_bytes=1 << 24)
    seen = drafts_of(llm)
    assert run(llm, texts=[text]) == [plain(kind)[2]]
    num_found = llm.engine.stats().prefix_cache_hits
    assert num_found == 3 * BLOCK
    for tokens, drafts in seen[::8]:
        assert drafts == formula_of(kind).drafts(tokens, len(drafts), num_found)


# ---- a trained head --------------------------------------------------------------------------------------------------


NUM_STEPS, BATCH, TRAINED = 500, 8, 96
"""Steps of training, texts of a step, and tokens of a text."""
NUM_LEARNT = 800
"""Tokens of the documents that are learnt, more than a hundred times."""


def train(kind: str, model: Any, head: Any, joins: dict[str, torch.Tensor], tokens: torch.Tensor) -> None:
    """Trains a model and its head together, as DeepSeek-V3's were."""
    generator = torch.Generator().manual_seed(0)
    parameters = [*model.parameters(), *head.model.layers.parameters(), *head.model.norm.parameters(), *joins.values()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    shift, eps = int(kind in OF_QWEN), model.config.rms_norm_eps

    def norm(x: torch.Tensor, part: str) -> torch.Tensor:
        scaled: torch.Tensor = torch.nn.functional.rms_norm(x, x.shape[-1:], shift + joins[part], eps)
        return scaled

    def loss(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(states).flatten(0, 1), targets.flatten())

    for _ in range(NUM_STEPS):
        starts = torch.randint(0, len(tokens) - TRAINED, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + TRAINED] for start in starts.tolist()])
        hidden = model.model(batch, use_cache=False).last_hidden_state
        embedded = norm(model.model.embed_tokens(batch[:, 1:]), "embedding_norm")
        joined = torch.cat((embedded, norm(hidden[:, :-1], "hidden_norm")), dim=-1) @ joins["join"].T
        states = head.model(inputs_embeds=joined, use_cache=False).last_hidden_state
        total = loss(hidden[:, :-1], batch[:, 1:]) + 0.5 * loss(states[:, :-1], batch[:, 2:])
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def accepted_by_formula(formula: Formula, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """How many drafts of the formula are verified while `answer` is drawn, and how many of them are accepted."""
    num_known, num_drafted, num_accepted = 1, 0, 0
    while num_known < len(answer):
        count = min(MTP["max_draft_tokens"], len(answer) - num_known - 1)
        drafts = formula.drafts(prompt + answer[:num_known], count) if count else []
        right = [draft == token for draft, token in zip(drafts, answer[num_known:], strict=False)]
        accepted = (*right, False).index(False)
        num_drafted, num_accepted, num_known = num_drafted + count, num_accepted + accepted, num_known + accepted + 1
    return num_drafted, num_accepted


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_half_of_the_drafts_of_a_trained_head_are_accepted(kind: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    case, hidden = CASES[kind], SIZES["hidden_size"]
    config = getattr(transformers, case.config)(**SIZES | case.options, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    head = layer_model.__wrapped__(kind)
    joins = {part: torch.full((hidden,), 1.0 - (kind in OF_QWEN)) for part in ("embedding_norm", "hidden_norm")}
    joins["join"] = torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5
    for each in joins.values():
        each.requires_grad_()
    make_tokenizer(tmp_path)
    tokens = pieces(Tokenizer(tmp_path))[0][:NUM_LEARNT]
    with on_one_thread():
        train(kind, model, head, joins, tokens)
    model.eval().save_pretrained(tmp_path)
    write_head(head.eval(), {part: each.detach() for part, each in joins.items()}, kind, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_threads=1, speculative=MTP)
    asked = [tokens[start : start + 40].tolist() for start in range(0, NUM_LEARNT, NUM_LEARNT // 4)]
    params = msgspec.structs.replace(GREEDY, max_tokens=TRAINED - 40)
    answers = run(llm, params, asked)
    formula = Formula(kind, tmp_path, model, head)
    pairs = [accepted_by_formula(formula, *each) for each in zip(asked, answers, strict=True)]
    drafts = llm.engine.stats().drafts
    num_drafted, num_accepted = sum(drafts.drafted["mtp"]), sum(drafts.accepted["mtp"])
    assert (num_drafted, num_accepted) == tuple(map(sum, zip(*pairs, strict=True)))
    assert num_accepted >= 0.5 * num_drafted


# ---- what is refused, and what a check says --------------------------------------------------------------------------


def test_what_has_no_head_that_is_run_is_refused_by_name() -> None:
    for folder, named in (
        (checkpoint("llama"), "LlamaForCausalLM"),
        (folder_of("nemotron_h"), "NemotronHForCausalLM"),
        (folder_of("qwen3_5"), "mtp.pre_fc_norm_hidden.weight"),
        (folder_of("deepseek_v3"), "model.layers.4.hnorm.weight"),
    ):
        with pytest.raises(ModelError, match=named):
            check_quickly(EngineConfig(model=str(folder), speculative=SpeculativeConfig(proposers=("mtp",))))
        with pytest.raises(ModelError, match=named):
            LLM(str(folder), speculative={"proposers": ["mtp"]})
    with pytest.raises(ValueError, match="draft and mtp"):
        SpeculativeConfig(proposers=("draft", "mtp"), draft_model="x")


def test_a_damaged_head_is_refused_by_its_tensor_and_else_ignored(tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder_with_head("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damaged = "model.layers.4.eh_proj.weight"
    tensors[damaged] = tensors[damaged][:, 1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=damaged):
        LLM(str(tmp_path), speculative={"proposers": ["mtp"]})
    LLM(str(tmp_path), kv_cache_bytes=1 << 20)


def test_a_multimodal_checkpoint_has_its_head(tmp_path: pathlib.Path) -> None:
    """Qwen3.5 is published as one with pictures."""
    shutil.copytree(folder_with_head("qwen3_5"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    config = load_model_config(tmp_path)
    assert config.wrapper == "Qwen3_5ForConditionalGeneration"
    assert stored_draft_head(tmp_path, config).is_draft_head
    text_alone = run(make_llm("qwen3_5"))
    assert run(LLM(str(tmp_path), dtype="float32", num_threads=1, speculative=MTP)) == text_alone


@pytest.mark.usefixtures("trials_here")
def test_a_check_says_that_there_is_a_head_and_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for speculative in ({}, {"speculative": {"proposers": ["mtp"]}}):
        engine = {"model": str(folder_with_head("glm4_moe")), "device": "cpu", "dtype": "float32"}
        assert run_check(None, {"engine": engine | {"kv_cache_bytes": 1 << 24} | speculative}) == 0
        rows = {line[:13].rstrip(): line[14:] for line in capsys.readouterr().out.splitlines()}
        assert rows["draft heads"].startswith("one")
        sizes.append(rows["KV cache"])
    assert sizes[0] != sizes[1]
