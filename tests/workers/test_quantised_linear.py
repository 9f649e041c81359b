"""A quantised linear needs a reader of its scheme and a maker on its platform; the layers stay one call beside it.

Int8 by weight only, made here: what `workers/checkpoints/schemes.py` and a platform would gain.
"""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from tests.checkpoints import checkpoint, make_checkpoint
from tests.workers.cpu_forms import TORCH, in_form
from tests.workers.test_models import Cache, random_tokens
from workers.checkpoints import schemes
from workers.checkpoints.model_folder import load_model_config
from workers.checkpoints.schemes import LinearSource, read_unquantized
from workers.decoders.decoder import Decoder
from workers.kernels import build
from workers.kernels.attention_metadata import AttentionMetadata
from workers.kernels.quantized_weight import QuantizedWeight
from workers.kernels.weights import Linear, LinearWeight
from workers.models.model_config import ModelConfig, ModelError
from workers.platforms.cpu import CpuPlatform
from workers.platforms.cpu_linears import make_dense_linear
from workers.torch_worker.loader import check_tensors, load_model

SCHEME = "int8"

needs_kernels = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler: nothing is one call")


def read_int8(source: LinearSource) -> LinearWeight:
    """`weight` int8 [out, in] and `weight_scale` float32 [out, 1]; linears without a scale are not quantised."""
    if not source.has("weight_scale"):
        return read_unquantized(source)
    spec = source.spec
    values = source.stacked("weight", (spec.in_features,), torch.int8)
    weight = QuantizedWeight(values, source.copied("weight_scale", (1,), torch.float32))
    shape = torch.empty(values.shape, dtype=source.dtype, device="meta")
    return LinearWeight(spec.name, shape, source.bias(), source.dtype, spec.is_gated, weight)


class Int8Linear:
    def __init__(self, weight: LinearWeight) -> None:
        assert weight.quantized is not None
        self.values, self.scales = weight.quantized.values.clone(), weight.quantized.scales[:, 0]
        self.bias = weight.bias
        self.gated = weight.gated

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        product = F.linear(x.float(), self.values.float()) * self.scales
        product = product if self.bias is None else product + self.bias.float()
        if self.gated:
            gate, up = product.chunk(2, dim=-1)
            product = F.silu(gate) * up
        return product.to(x.dtype)


class Int8Platform(CpuPlatform):
    make_int8_linear: type[Int8Linear] = Int8Linear

    def make_linear(self, weight: LinearWeight) -> Linear:  # type: ignore[override]
        return make_dense_linear(weight) if weight.quantized is None else self.make_int8_linear(weight)


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schemes.READERS, SCHEME, read_int8)


def quantise(folder: pathlib.Path, *parts: str) -> dict[str, torch.Tensor]:
    """Stores the linears whose names end so in int8; returns what they stand for, by tensor."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    meant = {}
    for name in [name for name in tensors if name.removesuffix(".weight").endswith(parts)]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        values = (tensors[name].float() / scale).round().to(torch.int8)
        meant[name] = values.float() * scale
        tensors[name], tensors[f"{name}_scale"] = values, scale
    assert meant
    safetensors.torch.save_file(tensors, path)
    return meant


def int8_config(folder: pathlib.Path) -> ModelConfig:
    return msgspec.structs.replace(load_model_config(folder), scheme=SCHEME)


def load_int8(folder: pathlib.Path, dtype: str) -> Decoder:
    model = load_model(folder, int8_config(folder), dtype, Int8Platform(None))
    assert isinstance(model, Decoder)
    return model


def logits_of(folder: pathlib.Path, model: Decoder, dtype: str = "float32") -> torch.Tensor:
    """Of two sequences: a prefill in two chunks, and decodes in the same steps."""
    cache = Cache(folder, dtype, model)
    logits = cache.run((0, random_tokens(40)), (1, random_tokens(70, seed=1)))
    logits += cache.run((0, random_tokens(33, seed=2)), (1, [5]))
    logits += cache.run((0, [6]), (1, [7]))
    return torch.cat(logits)


PARTS = {
    "down": ("down_proj",),
    "attention, of three parts in one": ("q_proj", "k_proj", "v_proj"),
    "gate and up": ("gate_proj", "up_proj"),
    "every linear of the layers": ("_proj",),
}


@needs_kernels
@pytest.mark.parametrize("parts", PARTS)
def test_an_int8_linear_computes_what_its_weight_stands_for_and_the_others_stay_one_call(
    parts: str, tmp_path: pathlib.Path
) -> None:
    folder = make_checkpoint("llama", tmp_path / "int8", attention_bias=True)
    meant = quantise(folder, *PARTS[parts])
    model = load_int8(folder, "float32")
    expected_folder = make_checkpoint("llama", tmp_path / "float32", attention_bias=True)
    tensors = safetensors.torch.load_file(expected_folder / "model.safetensors")
    safetensors.torch.save_file({**tensors, **meant}, expected_folder / "model.safetensors")
    expected = load_model(expected_folder, load_model_config(expected_folder), "float32", CpuPlatform(None))
    assert isinstance(expected, Decoder)
    torch.testing.assert_close(logits_of(folder, model), logits_of(expected_folder, expected), atol=3e-4, rtol=1e-4)

    assert expected.compiled is not None
    assert model.compiled is not None
    assert len(expected.compiled.called_back) == 0  # type: ignore[attr-defined]
    linears = {"down": 1, "attention, of three parts in one": 1, "gate and up": 1}.get(parts, 4)
    assert len(model.compiled.called_back) == linears * model.config.num_layers  # type: ignore[attr-defined]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_kinds_in_one_call_give_the_bits_of_the_loop(dtype: str, tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, dtype=dtype)
    quantise(folder, "down_proj", "o_proj")
    model = load_int8(folder, dtype)
    together = logits_of(folder, model, dtype)
    assert model.compiled is not None
    model.compiled = None
    assert torch.equal(together, logits_of(folder, model, dtype))


@needs_kernels
def test_a_gate_of_a_size_that_the_kernel_does_not_take_leaves_the_rest_in_one_call() -> None:
    folder = checkpoint("llama", intermediate_size=40)
    model = load_model(folder, load_model_config(folder), "float32", CpuPlatform(None))
    assert isinstance(model, Decoder)
    assert len(model.compiled.called_back) == 3  # type: ignore[union-attr]
    together = logits_of(folder, model)
    model.compiled = None
    assert torch.equal(together, logits_of(folder, model))


@needs_kernels
def test_what_a_linear_raises_comes_out_of_the_one_call(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    quantise(folder, "down_proj")

    class Broken(Int8Linear):
        def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
            raise RuntimeError("no such instruction")

    platform = Int8Platform(None)
    platform.make_int8_linear = Broken
    model = load_model(folder, int8_config(folder), "float32", platform)
    assert isinstance(model, Decoder)
    with pytest.raises(RuntimeError, match="no such instruction"):
        logits_of(folder, model)


def test_without_a_compiler_the_loop_runs_it_too(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    quantise(folder, "down_proj")
    with in_form(TORCH):
        model = load_int8(folder, "float32")
        assert model.compiled is None
        by_torch = logits_of(folder, model)
    torch.testing.assert_close(by_torch, logits_of(folder, load_int8(folder, "float32")), atol=3e-4, rtol=1e-4)


def test_headers_are_checked_by_the_scheme(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    quantise(folder, "down_proj")
    check_tensors(folder, int8_config(folder))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight is I8; only F32, BF16, F16"):
        check_tensors(folder, load_model_config(folder))


def test_dense_weights_compute_what_the_integers_stand_for(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    quantise(folder, "_proj")
    dense = load_model(folder, int8_config(folder), "float32", CpuPlatform(None), weights="dense")
    assert isinstance(dense, Decoder)
    torch.testing.assert_close(
        logits_of(folder, dense), logits_of(folder, load_int8(folder, "float32")), atol=3e-4, rtol=1e-4
    )
