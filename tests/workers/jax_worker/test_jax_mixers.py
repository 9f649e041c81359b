"""Mixers of every kind on the JAX worker, through the engine's histories and cases of computing again: the tokens of
transformers, and those of each request alone.

Each engine compiles its programs, so `make test` runs one short history here, and `make prove` runs all.
"""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
from typing import Any

import msgspec
import pytest

from manta.cluster.cli.check import run_check
from manta.cluster.llm import SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.jax_worker import mixers
from manta.workers.jax_worker.mesh import open_mesh
from manta.workers.jax_worker.model_state import held_state
from manta.workers.models.families import describe
from manta.workers.models.recurrent_shapes import RecurrentKind
from manta.workers.models.variants import NOT_COMPUTED, OF_KINDS
from tests.checkpoints import reference_greedy
from tests.engine import test_layer_kinds_engine, test_recurrent_engine
from tests.engine.histories import GREEDY, NGRAM, expected, prompts
from tests.engine.test_mixers_engine import HISTORIES
from tests.engine.test_recurrent_engine import CASES, num_hits, run
from tests.engine_parts import worker_of
from tests.fuzz import engines
from tests.fuzz.campaign import check_engine
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_models import random_tokens

SMALL: dict[str, Any] = {"device": "tpu", "max_num_batched_tokens": 64, "overlap": "on"}
MIXERS = ("qwen3_next", "qwen3_5", "granite_hybrid", "bamba", "nemotron_h", "mamba2", "jamba", "falcon_mamba")
MIXERS += ("lfm2", "lfm2, convolutions only", "lfm3", "kimi_linear", "bailing_hybrid", "olmo_hybrid", "falcon_h1")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "minicpm3", "youtu", "axk1")


def make_llm(kind: str, **options: Any) -> Any:
    made = test_recurrent_engine.make_llm(kind, **SMALL | options)
    assert type(worker_of(made.engine)).__name__ == "JaxWorker"
    return made


@pytest.mark.prove
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", MIXERS)
def test_every_history_gives_the_tokens_of_transformers(kind: str, history: str) -> None:
    llm = make_llm(kind, **HISTORIES[history])
    assert run(llm) == expected(kind)
    hits = llm.engine.stats().prefix_cache_hits
    assert run(llm) == expected(kind), "from snapshots"
    assert llm.engine.stats().prefix_cache_hits > hits
    has_attention = kind not in ("mamba2", "falcon_mamba", "lfm2, convolutions only")
    assert bool(llm.engine.stats().num_preemptions) == (history == "preempted" and has_attention)


@pytest.mark.prove
@pytest.mark.parametrize("history", test_layer_kinds_engine.HISTORIES)
@pytest.mark.parametrize("kind", LATENT)
def test_latent_vectors_have_every_history(kind: str, history: str) -> None:
    llm = test_layer_kinds_engine.make_llm(kind, **SMALL | test_layer_kinds_engine.HISTORIES[history])
    greedy = [[token_ids] for token_ids in expected(kind)]
    assert test_layer_kinds_engine.tokens(llm) == greedy
    assert test_layer_kinds_engine.tokens(llm) == greedy, "from the prefix cache"
    assert llm.engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.prove) for kind in ("qwen3_next", "jamba")])
def test_choices_share_their_prompt(kind: str) -> None:
    """Those of one request are forks, and have the tokens of requests with these seeds alone."""
    params = SamplingParams(n=3, seed=5, temperature=0.8, max_tokens=12, ignore_eos=True)
    assert run(make_llm(kind), params) == run(make_llm(kind, max_num_batched_tokens=16), params)


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in CASES if name != "a draft model"])
@pytest.mark.parametrize("family", ["lfm2", "lfm2_convolutions"])
@pytest.mark.usefixtures("plugin")
def test_no_state_is_updated_twice(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late masks, forks, rejected drafts, steps under way and failed steps."""
    monkeypatch.setattr(engines, "DEVICE", "tpu")
    case = CASES[name]
    settings = msgspec.structs.replace(case.settings, family=family, max_num_sequences=8, max_model_len=128)
    problems, _ = check_engine(msgspec.structs.replace(case, settings=settings))
    assert not problems


@pytest.mark.prove
def test_a_repeated_prompt_is_found_to_its_last_block() -> None:
    llm, prompt = make_llm("qwen3_next"), random_tokens(100)
    assert [num_hits(llm, prompt) for _ in range(3)] == [0, 96, 96]


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["qwen3_5", "falcon_mamba"])
def test_a_check_says_what_states_take(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"model": str(folder_of(kind)), "device": "tpu", "dtype": "float32", "speculative": NGRAM}
    assert run_check(None, {"engine": engine}) == 0
    assert "KiB each, of which a decode takes two" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["qwen3_5", "bamba", "jamba", "lfm2"])
def test_a_device_plans_its_share_of_states_and_what_a_tpu_fills_up(kind: str) -> None:
    config = load_model_config(folder_of(kind))
    for layer, state in zip(describe(config).layers, config.states, strict=True):
        for size in (1, 2):
            own, filled = (held_state(layer.mixer, open_mesh(size), is_padded) for is_padded in (False, True))
            assert (own is None, filled is None) == (state is None,) * 2
            if state is None or own is None or filled is None:
                continue
            assert own.num_bytes == state.share(size).num_bytes
            assert filled.num_bytes > own.num_bytes
            assert not any(shape[-2] % 8 or shape[-1] % 128 for shape in filled.tensors)


def test_every_kind_of_recurrent_mixer_is_computed_or_refused() -> None:
    assert set(mixers.MIXERS) == {kind for kind in RecurrentKind if OF_KINDS.get(kind) not in NOT_COMPUTED["tpu"]}


def test_a_delta_net_gives_the_tokens_of_transformers() -> None:
    """Chunks, drafts, preemption, prefixes and forks, in one engine whose steps have one size: what `make test` can
    afford.
    """
    llm = make_llm("qwen3_5", max_num_batched_tokens=8, num_sequences=3, num_blocks=7, speculative=NGRAM)
    params = msgspec.structs.replace(GREEDY, n=2, max_tokens=20)
    greedy = [reference_greedy(folder_of("qwen3_5"), prompt, params.max_tokens) for prompt in prompts()[2:]]
    for _ in range(2):
        outputs = llm.generate(prompts()[2:], params, use_tqdm=False)
        assert [[choice.token_ids for choice in output.outputs] for output in outputs] == [
            [each] * 2 for each in greedy
        ]
    stats = llm.engine.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0
    assert sum(stats.drafts.accepted["ngram"]) < sum(stats.drafts.drafted["ngram"])
