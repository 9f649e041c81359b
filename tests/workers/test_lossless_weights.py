"""`weights: lossless` in whole models: the tokens of plain bfloat16 weights, from three quarters of their bytes."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch

from manta.cluster.cli.__main__ import main
from manta.cluster.cli.check import check_machine, check_model
from manta.cluster.config import EngineConfig
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels import build
from manta.workers.models.model_config import ModelError
from manta.workers.platforms import choose_platform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.torch_worker import TorchWorker
from tests.checkpoints import checkpoint
from tests.workers.cpu_forms import TORCH, in_form
from tests.workers.test_models import random_tokens
from tests.workers.test_quantised_linear import logits_of
from tests.workers.test_shared_weights import files, linears, needs_shared_weights

pytestmark = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler")


def load(folder: pathlib.Path, weights: str) -> Decoder:
    model = load_model(folder, load_model_config(folder), "bfloat16", choose_platform("cpu", None), weights=weights)
    assert isinstance(model, Decoder)
    return model


def drawn(folder: pathlib.Path, weights: str, **options: object) -> list[list[int]]:
    """Returns the tokens of prompts of several lengths, together and one after another."""
    llm = LLM(str(folder), dtype="bfloat16", weights=weights, kv_cache_bytes=1 << 22, **options)
    prompts = [random_tokens(length, seed=length) for length in (3, 20, 41, 5, 6, 7, 30)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, n=2)
    outputs = llm.generate(prompts, params, use_tqdm=False) + llm.generate(prompts[:1], params, use_tqdm=False)
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "gpt_neox", "lfm2"])
def test_a_model_draws_the_same_tokens(family: str) -> None:
    """Natively, with tied heads, of experts, of another mixer, and through transformers."""
    folder = checkpoint(family, dtype="bfloat16")
    assert drawn(folder, "lossless") == drawn(folder, "auto")


def test_a_draft_model_is_kept_so_too() -> None:
    speculative = {"proposers": ["draft"], "draft_model": str(checkpoint("qwen3")), "adaptive": False}
    folder = checkpoint("llama", dtype="bfloat16")
    assert drawn(folder, "lossless", speculative=speculative) == drawn(folder, "auto", speculative=speculative)


@pytest.mark.usefixtures("trials_here")
def test_it_takes_the_bytes_that_the_plan_counts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    folder = checkpoint("llama", dtype="bfloat16", **sizes)
    plain, lossless = (sum(each.num_bytes for each in linears(load(folder, form))) for form in ("auto", "lossless"))
    assert 0.75 < lossless / plain < 0.76
    config = load_model_config(folder)
    whole, planned = (weight_bytes(folder, "bfloat16", config, form) for form in ("auto", "lossless"))
    assert whole - planned == pytest.approx(plain - lossless, rel=0.02)
    assert check_model(EngineConfig(model=str(folder), weights="lossless")).weight_bytes == planned
    words = "bfloat16 in 12 bits, without loss; embedding and norms unchanged"
    assert main(["check", str(folder), "--set", "engine.weights=lossless"]) == 0
    assert words in capsys.readouterr().out


@needs_shared_weights
def test_processes_share_them(tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(checkpoint("llama", dtype="bfloat16"), tmp_path / "model")
    before = files()
    first, second = load(folder, "lossless"), load(folder, "lossless")
    assert len(files() - before) == 1
    assert torch.equal(logits_of(folder, first, "bfloat16"), logits_of(folder, second, "bfloat16"))
    others = load(folder, "auto")
    assert len(files() - before) == 2
    assert torch.equal(logits_of(folder, first, "bfloat16"), logits_of(folder, others, "bfloat16"))


def test_what_it_cannot_keep_is_refused() -> None:
    folder = str(checkpoint("llama"))
    with pytest.raises(ModelError, match="weights lossless keeps bfloat16, and dtype is float32; set dtype"):
        TorchWorker(EngineConfig(model=folder, dtype="float32", weights="lossless", kv_cache_bytes=1 << 20))
    for device in ("tpu", "cuda"):
        with pytest.raises(ModelError, match=f"weights lossless is for CPUs, and the device is {device}"):
            check_machine(EngineConfig(model=folder, device=device, weights="lossless"))
    with in_form(TORCH), pytest.raises(ModelError, match="weights lossless needs the compiled kernels: MANTA_NO"):
        TorchWorker(EngineConfig(model=folder, dtype="bfloat16", weights="lossless", kv_cache_bytes=1 << 20))
