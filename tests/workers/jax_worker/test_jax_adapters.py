"""Adapters on the JAX worker: the tokens of PEFT and of merged weights in float32, on meshes of simulated devices."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.torch import load_file

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.adapter_key import AdapterKey
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.jax_worker.adapter_pools import AdapterPools
from manta.workers.jax_worker.layer_arrays import LinearArrays
from manta.workers.jax_worker.low_rank import (
    AdaptedArrays,
    RankPool,
    TokenAdapter,
    add_low_rank,
    pack_adapters,
)
from manta.workers.jax_worker.mesh import open_mesh
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from tests.adapters import Adapters, merged, write_adapter
from tests.async_tests import async_test
from tests.checkpoints import checkpoint, reference_greedy
from tests.llm.test_llm_adapters import KINDS
from tests.loaded_adapters import loading
from tests.workers.test_layer_kinds import folder_of

NUM_TOKENS = 12
PROMPT = [30 + 7 * place % 280 for place in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL: dict[str, Any] = {
    "device": "tpu",
    "dtype": "float32",
    "max_num_sequences": 8,
    "max_num_batched_tokens": 8,
    "kv_cache_bytes": 1 << 20,
}
ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def eight_heads(**options: Any) -> pathlib.Path:
    """Heads for eight devices; two KV heads, which several devices then share."""
    return checkpoint("llama", num_attention_heads=8, num_key_value_heads=2, **options)


def tokens(llm: LLM, names: list[str], params: SamplingParams = GREEDY) -> list[list[int]]:
    answers = llm.generate([PROMPT] * len(names), params, use_tqdm=False, adapter=names)
    return [answer.outputs[0].token_ids for answer in answers]


def test_adapters_in_one_batch_are_what_merged_weights_compute(tmp_path: pathlib.Path) -> None:
    """On two devices, each with rows of no adapter beside it; then the step without adapters is as before."""
    base = eight_heads(num_hidden_layers=1)
    folders = {
        "wide": write_adapter(base, tmp_path / "wide", ALL, 9),
        "narrow": write_adapter(base, tmp_path / "narrow", ("self_attn.k_proj",), 2),
    }
    llm = LLM(str(base), tensor_parallel_size=2, adapters={name: str(each) for name, each in folders.items()}, **SMALL)
    models = {name: merged(base, each, tmp_path / f"merged-{name}") for name, each in folders.items()} | {"": base}
    names = ["wide", "", "narrow", "wide", "narrow"]
    expected = {name: reference_greedy(models[name], PROMPT, NUM_TOKENS) for name in models}
    assert len(set(map(tuple, expected.values()))) == 3, "each adapter has tokens of its own"
    assert tokens(llm, names) == [expected[name] for name in names]
    assert tokens(llm, [""]) == [expected[""]]
    assert {name: each.rank for name, each in llm.engine.model.adapters.items()} == {"wide": 9, "narrow": 2}


def test_a_product_without_bounds_stays_with_its_adapter() -> None:
    """An adapter's first products overflow. Rows of others must not meet them."""
    packed = pack_adapters(8, 8, [TokenAdapter((3,), 1.0), None, TokenAdapter((4, 5), 0.5)], np.array([1, 2, 1]))
    numbers, factors, places, owners = np.split(packed, 4)
    assert numbers.tolist() == [0, -1, -1, 1, -1, -1, -1, -1]
    assert factors.view(np.float32).tolist() == [1, 0, 0, 0.5, 0, 0, 0, 0]
    assert (places[:3].tolist(), owners.tolist()) == ([3, 4, 5], [0, 1, 1, -2, -2, -2, -2, -2])
    x = jnp.ones((2, 4))
    ranks = RankPool(jnp.array([[3e38] * 4, [1.0] * 4]), jnp.ones((2, 3)), jnp.array([1.0, 2.0]))
    weights = AdaptedArrays(LinearArrays(jnp.zeros((3, 4)), None), ranks, jnp.array([[0.0, 1.0], [1.0, 0.0]]))
    added = np.asarray(add_low_rank(jnp.zeros((2, 3)), x, weights))
    assert added[0].tolist() == [8, 8, 8]
    assert np.isinf(added[1]).all()


def pools_of(base: pathlib.Path, num_devices: int, **options: Any) -> AdapterPools:
    mesh = open_mesh(num_devices)
    return AdapterPools(
        ModelOptions(model=str(base), device="tpu", **options), base, load_model_config(base), "float32", mesh
    )


def test_ranks_are_given_back_and_too_many_are_refused(tmp_path: pathlib.Path) -> None:
    base = eight_heads(num_hidden_layers=1)
    adapters = {rank: write_adapter(base, tmp_path / str(rank), ALL, rank) for rank in (1, 20, 30)}
    of_queries, of_keys, of_mlp = 64 + 64 // 4, 64 + 4 * 8 // 4, 64 + 96 // 4  # each device has a copy of a KV head
    bytes_of_rank = 4 * (2 * of_queries + 2 * of_keys + 3 * of_mlp + 7)
    limit = 40 * bytes_of_rank + 100
    roots = {"adapter_roots": (str(tmp_path),), "max_adapter_bytes": limit}
    pools = pools_of(base, 4, adapters={"one": str(adapters[1])}, **roots)
    read = {rank: pools.read(str(each)) for rank, each in adapters.items()}
    assert pools.rank_sizes == [40]
    assert pools.loaded["one"].num_bytes == bytes_of_rank == read[1].num_bytes
    assert [pools.hold(read[rank]) for rank in (1, 20, 30)] == [True, True, False]
    pools.drop(read[20].digest)
    pools.drop(read[20].digest)  # which has gone already
    assert pools.hold(read[30])
    places = list(pools.pack(8, [AdapterKey(read[30].digest)], np.array([1]))[1][-80:-50])
    halves = load_file(adapters[30] / "adapter_model.safetensors")
    first = halves["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"].numpy()
    second = halves["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].numpy()
    name = next(each for each in pools.pools if each.endswith("v_proj 2"))
    held = pools.pools[name]
    assert np.array_equal(np.asarray(held.a)[places], first)
    of_heads = np.asarray(held.b)[places].reshape(30, 4, 8)  # the first two devices have the first head
    assert np.array_equal(of_heads[:, ::2].reshape(30, -1), second.T)
    assert np.array_equal(of_heads[:, 1::2], of_heads[:, ::2])
    assert {shard.data.shape for shard in held.b.addressable_shards} == {(40, 8)}
    with pytest.raises(ModelError, match="has rank 45, and there is room for 39"):
        pools.read(str(write_adapter(base, tmp_path / "45", ALL, 45)))
    with pytest.raises(ModelError, match="raise max_adapter_bytes"):
        pools_of(base, 1, adapters={"a": str(adapters[20])}, max_adapter_bytes=30 * bytes_of_rank)


@functools.cache
def of_each_kind() -> Adapters:
    adapters = Adapters(eight_heads())
    for seed, (name, options) in enumerate(KINDS.items()):
        adapters.add(name, seed, **options)
    return adapters


@pytest.mark.prove
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_each_kind_in_one_batch_is_what_peft_computes(num_devices: int) -> None:
    """Together they have more ranks than a program of the smallest size."""
    adapters = of_each_kind()
    limits = {"max_num_sequences": 16, "max_num_batched_tokens": 32}
    llm = make_llm(adapters, tensor_parallel_size=num_devices, **limits)
    names = ["", *KINDS, "queries", ""]
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names]
    assert len({tuple(each) for each in expected}) == len(KINDS) + 1
    assert tokens(llm, names) == expected
    for name in ("everything", "patterns", ""):
        assert tokens(llm, [name]) == [adapters.greedy(PROMPT, name, NUM_TOKENS)]
    llm.engine.check_integrity()


def make_llm(adapters: Adapters, **options: Any) -> LLM:
    return LLM(str(adapters.base), adapters=dict(adapters.folders), **(SMALL | options))


@pytest.mark.prove
@pytest.mark.parametrize("family", ["qwen2", "phi3", "olmo2", "granite", "mistral", "qwen3_windows", "seed_oss"])
def test_linears_of_other_families(family: str) -> None:
    """With biases, tied heads, parts that are stored together, and norms in other places."""
    assert_as_peft(checkpoint(family), "all-linear")


@pytest.mark.prove
@pytest.mark.parametrize("case", ["gemma2", "glm", "cohere2"])
def test_linears_of_other_layers(case: str) -> None:
    assert_as_peft(folder_of(case), "all-linear")


def assert_as_peft(base: pathlib.Path, targets: Any) -> None:
    adapters = Adapters(base)
    adapters.add("a", 1, r=8, target_modules=targets)
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in ("a", "")]
    assert expected[0] != expected[1]
    assert tokens(make_llm(adapters, tensor_parallel_size=2), ["a", ""]) == expected


@pytest.mark.prove
def test_choices_and_drafts_go_with_an_adapter() -> None:
    adapters = Adapters(checkpoint("llama"))
    adapters.add("drafted", 3, r=16)
    plain, drafting = (make_llm(adapters, **each) for each in ({}, {"speculative": {"proposers": ["ngram"]}}))
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in ("drafted", "")]
    assert tokens(drafting, ["drafted", ""]) == expected == tokens(plain, ["drafted", ""])
    sampled = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    choices = [
        [choice.token_ids for choice in llm.generate([PROMPT], sampled, use_tqdm=False, adapter="drafted")[0].outputs]
        for llm in (plain, drafting)
    ]
    assert choices[0] == choices[1]


@pytest.mark.prove
def test_experts_take_no_adapters_and_their_attention_does() -> None:
    adapters = Adapters(folder_of("gpt_oss"))
    adapters.add("attention", 1, r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in ("attention", "")]
    assert expected[0] != expected[1]
    assert tokens(make_llm(adapters), ["attention", ""]) == expected


@pytest.mark.prove
def test_bfloat16_begins_as_alone() -> None:
    adapters = Adapters(checkpoint("llama", dtype="bfloat16"))
    adapters.add("a", 1, r=8)
    llm = make_llm(adapters, dtype="bfloat16")
    together = [each[0] for each in tokens(llm, ["a", "", "a"])]
    assert together == [tokens(llm, [name])[0][0] for name in ("a", "", "a")]
    assert together[0] != together[1]


@pytest.mark.prove
def test_a_load_compiles_nothing_and_a_reload_changes_later_steps_only(tmp_path: pathlib.Path) -> None:
    base = eight_heads()
    folders = [write_adapter(base, tmp_path / str(rank), ALL, rank) for rank in (3, 17, 40)]
    models = [merged(base, each, tmp_path / f"merged-{each.name}") for each in folders]
    expected = [reference_greedy(model, PROMPT, NUM_TOKENS) for model in models]
    llm = LLM(str(base), adapter_roots=(str(tmp_path),), max_adapter_bytes=1 << 20, **SMALL)
    executor: Any = llm.engine.executor
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    found = []
    for folder in (*folders, folders[0]):
        adapter = executor.read_adapter(str(folder))
        assert llm.engine.adapters.hold(adapter)
        found.append(answer_of(llm, adapter.digest))
        assert llm.engine.adapters.drop(adapter.digest)
    assert found == [*expected, expected[0]]
    assert not [each for each in events if "compile" in each]


def answer_of(llm: LLM, digest: str) -> list[int]:
    """The greedy tokens under an adapter that the options do not name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "_digest_of", lambda _: digest)
        return tokens(llm, ["loaded"])[0]


@pytest.mark.prove
@async_test
async def test_adapters_are_loaded_over_http(tmp_path: pathlib.Path) -> None:
    base = checkpoint("llama")
    adapters = Adapters(base)
    for seed, name in enumerate(("first", "second")):
        adapters.add(name, 20 + seed, r=8)
    options = {**SMALL, "max_adapter_bytes": 1 << 20, "tensor_parallel_size": 2}
    async with loading(tmp_path, adapters, options) as server:
        for values in ("first", "second"):
            server.put(values, "values")
            assert (await server.load("name", "values", load_inplace=values == "second")).status_code == 200
            answer = (await server.ask("name", PROMPT, NUM_TOKENS, temperature=0, ignore_eos=True)).json()
            assert answer["choices"][0]["token_ids"] == adapters.greedy(PROMPT, values, NUM_TOKENS)
        assert (await server.unload("name")).status_code == 200
        assert (await server.ask("name", PROMPT, 1)).status_code == 404


@pytest.mark.prove
def test_two_hosts_have_one_hosts_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = Adapters(eight_heads())
    adapters.add("wide", 1, r=24)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    llm = make_llm(adapters, tensor_parallel_size=8, tpu_chips_per_host=4, num_threads=1)
    names = ["wide", "", "wide"]
    assert tokens(llm, names) == [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names]


@pytest.mark.parametrize("module", ["block_sparse_moe.experts.0.w1", "block_sparse_moe.gate"])
def test_routed_experts_and_routers_are_refused_by_name(module: str, tmp_path: pathlib.Path) -> None:
    base = checkpoint("mixtral")
    with pytest.raises(ModelError, match=f"{module}, which takes no adapters"):
        pools_of(base, 1, adapters={"a": str(write_adapter(base, tmp_path / "a", (module,), 2))})
