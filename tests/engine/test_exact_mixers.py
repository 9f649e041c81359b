"""`engine.exact` for a model of each mixer: the same tokens and log-probabilities in every form of the kernels and in
every history. `test_exact.py` does the same for a model with attention alone, and has digests of its answers.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.workers import decoders
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.exact import check_exact
from manta.workers.kernels import build
from manta.workers.model_options import ModelOptions
from manta.workers.platforms import choose_platform
from manta.workers.sampling_params import child_seed
from manta.workers.torch_worker.loader import load_model
from tests.engine.histories import NGRAM, prompts
from tests.engine.test_recurrent_engine import make_llm
from tests.workers.cpu_forms import COMPILED, in_form
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_models import Cache, random_tokens

needs_kernels = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler")

MIXERS = {
    "lfm2": "short convolutions",
    "qwen3_5": "gated delta nets, and gates on attention",
    "kimi_linear": "Kimi's delta attention, latent attention and experts that a sigmoid chooses",
    "falcon_h1": "Mamba 2 beside attention",
    "jamba": "Mamba 1 with norms, and experts that a softmax chooses",
    "minimax": "lightning attention",
    "minicpm3": "latent attention with ranks of queries",
}
"""A family of each mixer, and what it has."""
OTHERS = (
    "qwen3_next",
    "qwen3_5_moe",
    "qwen4_exp",
    "granite_hybrid",
    "granite_hybrid without experts",
    "falcon_h1 with norms",
    "nemotron_h",
    "bamba",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "lfm2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "glm4_moe",
    "mixtral",
    "mimo_v2",
    "mistral4",
    "llama4",
    "gpt_oss",
    "gemma2",
    "gemma3n",
    "gemma4",
    "gemma4, experts",
    "cohere2",
    "olmo2",
    "olmo_hybrid",
    "xlstm",
    "zamba2",
    "bailing_hybrid",
    "lara_mini",
    "lfm3",
    "recurrent_gemma",
    "zamba",
    "zaya",
    "inkling",
    "inkling2",
    "inkling2_loop",
    "rwkv",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm5_next",
    "axk2",
    "hy_v4",
    "deepseek_v4",
    "longcat_flash",
    "dots3_note",
)
"""More families with these mixers, or with other parts that are compiled for `exact` alone."""
KINDS = [*MIXERS, *(pytest.param(kind, marks=pytest.mark.prove) for kind in OTHERS)]
HISTORIES: dict[str, dict[str, Any]] = {
    "together": {"num_threads": 2},
    "chunks": {"max_num_batched_tokens": 11},
    "aligned chunks": {"max_num_batched_tokens": 40},
    "drafts": {"speculative": NGRAM, "num_threads": 2},
    "preempted": {"num_blocks": 10, "max_num_batched_tokens": 24},
}
NUM_TOKENS, NUM_CHOICES = 12, 4
Told = list[list[tuple[int, float]]]
"""The tokens of each choice with their log-probabilities."""


def params(index: int) -> SamplingParams:
    """Returns the parameters of a prompt. One prompt has several choices, which fork its state."""
    num_choices = NUM_CHOICES if index == 1 else 1
    return SamplingParams(
        seed=index, temperature=0.8, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True, n=num_choices
    )


def alone() -> Iterator[tuple[list[int], SamplingParams]]:
    """Gives each choice as a request of its own."""
    for index, prompt in enumerate(prompts()):
        of_all = params(index)
        seeds = [index] if of_all.n == 1 else [child_seed(index, choice) for choice in range(of_all.n)]
        yield from ((prompt, msgspec.structs.replace(of_all, seed=seed, n=1)) for seed in seeds)


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> Told:
    outputs = llm.generate([prompt for prompt, _ in requests], [each for _, each in requests], use_tqdm=False)
    choices = [choice for output in outputs for choice in output.outputs]
    assert all(choice.error is None for choice in choices)
    return [[(entry.token_id, entry.logprob) for entry in choice.logprobs or []] for choice in choices]


def make(kind: str, **options: Any) -> LLM:
    return make_llm(kind, weights="int8", exact=True, **options)


@functools.cache
def expected(kind: str) -> Told:
    llm = make(kind, num_sequences=1, enable_prefix_caching=False)
    return answers(llm, list(alone()))


@needs_kernels
@pytest.mark.axes_in_turns
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_history_gives_the_answers_of_each_request_alone(kind: str, history: str) -> None:
    llm = make(kind, **HISTORIES[history])
    requests = [(prompt, params(index)) for index, prompt in enumerate(prompts())]
    assert answers(llm, requests) == expected(kind)
    hits = llm.engine.stats().prefix_cache_hits
    assert answers(llm, requests) == expected(kind), "from snapshots"
    assert llm.engine.stats().prefix_cache_hits > hits
    config = load_model_config(folder_of(kind))
    attending = [window for window, attends in zip(config.sliding_windows, config.attends, strict=True) if attends]
    if history == "preempted" and None in attending:  # layers with windows give back blocks
        assert llm.engine.stats().num_preemptions > 0


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.prove)])
@pytest.mark.parametrize(
    "kind",
    [
        "kimi_linear",
        "jamba",
        "minimax",
        "gemma3n",
        *(
            pytest.param(kind, marks=pytest.mark.prove)
            for kind in ("gemma3", "lfm2", "qwen3_5", "falcon_h1", "minicpm3", *OTHERS)
            if kind != "gemma3n"
        ),
    ],
)
def test_every_form_gives_the_same_logits(kind: str, weights: str) -> None:
    """Gemma 3n has gates of GELU with tanh, of which some are turned off."""
    folder, tokens = folder_of(kind), random_tokens(60)
    config = load_model_config(folder)
    check_exact(ModelOptions(model=str(folder), exact=True, weights=weights), "cpu", config)
    found = []
    for form in COMPILED:
        with in_form(form), torch.inference_mode():
            platform = choose_platform("cpu", 1, exact=True)
            model = load_model(folder, config, "bfloat16", platform, weights=weights, exact=True)
            cache = Cache(folder, "bfloat16", model)
            found.append(torch.cat([cache.run((0, piece))[0] for piece in (tokens[:50], tokens[50:51], tokens[51:])]))
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].isfinite().all()


OTHER_LAST_BITS = {
    *("exp", "log", "log1p", "pow", "sqrt", "rsqrt", "tanh", "erf"),
    *("sigmoid", "logsigmoid", "softplus", "silu", "gelu", "softmax"),
    *("sum", "cumsum", "prod", "mean", "var", "std", "norm", "layer_norm", "rms_norm"),
    *("matmul", "bmm", "einsum", "linear", "addmm"),
}
"""Functions of torch whose last bits differ between processors, or with the sizes of a step."""
OF_NO_EXACT_STEP = {"transformers_model.py", "own_attention.py", "rope_table.py", "layer_windows.py"}
"""Modules of models that cannot be exact, and of tables that are computed once, with operations of one result."""


def test_decoders_leave_to_kernels_what_torch_computes_with_other_last_bits() -> None:
    found = []
    for path in pathlib.Path(decoders.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name in OF_NO_EXACT_STEP or not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            *owner, name = called.rsplit(".", 1)
            is_of_torch = bool(owner) and not owner[0].removesuffix(".recurrent").endswith("kernels")
            if called.startswith("reference.") or (name in OTHER_LAST_BITS and is_of_torch):
                found.append((path.name, called))
    assert not found
