"""A linear of integers on a platform of its own: it gets what the checkpoint stores, and the layers stay one call.

The checkpoints are compressed-tensors' int8 by output; `test_quantised_formats.py` has the others.
"""

from __future__ import annotations

import pathlib
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels import build
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.weights import Linear, LinearWeight, WeightContent
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.platforms.cpu_linears import make_dense_linear
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint
from tests.quantised_checkpoints import compressed, compressed_config, quantised_pair, scheme
from tests.workers.cpu_forms import TORCH, in_form
from tests.workers.test_models import Cache, random_tokens

needs_kernels = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler: nothing is one call")


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

    def shared_linears(self, content: WeightContent) -> nullcontext[None]:  # type: ignore[override]
        """Its linears are not packed."""
        return nullcontext()

    def make_linear(self, weight: LinearWeight) -> Linear:  # type: ignore[override]
        return make_dense_linear(weight) if weight.quantized is None else self.make_int8_linear(weight)


def quantised(folder: pathlib.Path, at: pathlib.Path, *parts: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The checkpoint with the linears whose names end so in int8, and the one that it stands for."""
    int8 = scheme(num_bits=8, strategy="channel")
    store = compressed("int-quantized", int8)
    config = compressed_config("int-quantized", int8)
    return quantised_pair(folder, at, lambda name, weight: store(weight) if name.endswith(parts) else None, config)


def load_int8(folder: pathlib.Path, dtype: str) -> Decoder:
    model = load_model(folder, load_model_config(folder), dtype, Int8Platform(None))
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
def test_an_int8_linear_keeps_the_single_call(parts: str, tmp_path: pathlib.Path) -> None:
    folder, expected_folder = quantised(checkpoint("llama", attention_bias=True), tmp_path, *PARTS[parts])
    model = load_int8(folder, "float32")
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
def test_mixed_kinds_give_the_loops_bits(dtype: str, tmp_path: pathlib.Path) -> None:
    folder, _ = quantised(checkpoint("qwen3", dtype=dtype), tmp_path, "down_proj", "o_proj")
    model = load_int8(folder, dtype)
    together = logits_of(folder, model, dtype)
    assert model.compiled is not None
    model.compiled = None
    assert torch.equal(together, logits_of(folder, model, dtype))


@needs_kernels
def test_an_odd_gate_keeps_the_single_call() -> None:
    folder = checkpoint("llama", intermediate_size=40)
    model = load_model(folder, load_model_config(folder), "float32", CpuPlatform(None))
    assert isinstance(model, Decoder)
    assert len(model.compiled.called_back) == 0  # type: ignore[union-attr]
    together = logits_of(folder, model)
    model.compiled = None
    assert torch.equal(together, logits_of(folder, model))


@needs_kernels
def test_a_linears_exception_leaves_the_single_call(tmp_path: pathlib.Path) -> None:
    folder, _ = quantised(checkpoint("llama", num_hidden_layers=2), tmp_path, "down_proj")

    class Broken(Int8Linear):
        def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
            raise RuntimeError("no such instruction")

    platform = Int8Platform(None)
    platform.make_int8_linear = Broken
    model = load_model(folder, load_model_config(folder), "float32", platform)
    assert isinstance(model, Decoder)
    with pytest.raises(RuntimeError, match="no such instruction"):
        logits_of(folder, model)


def test_without_a_compiler_the_loop_runs_it_too(tmp_path: pathlib.Path) -> None:
    folder, _ = quantised(checkpoint("llama"), tmp_path, "down_proj")
    with in_form(TORCH):
        model = load_int8(folder, "float32")
        assert model.compiled is None
        by_torch = logits_of(folder, model)
    torch.testing.assert_close(by_torch, logits_of(folder, load_int8(folder, "float32")), atol=3e-4, rtol=1e-4)


def test_headers_tell_quantisation_and_memory(tmp_path: pathlib.Path) -> None:
    folder, dense = quantised(checkpoint("llama"), tmp_path, "down_proj")
    plain = check_tensors(dense, load_model_config(dense))
    tally = check_tensors(folder, load_model_config(folder))
    config = load_model_config(folder)
    assert tally.kinds == {"8 bits by output": config.num_layers}
    num_quantised = config.num_layers * config.hidden_size * config.intermediate_size
    assert tally.num_integers == num_quantised
    assert tally.num_bytes("float32", keeps_integers=False) == plain.num_bytes("float32", keeps_integers=False)
    saved = 3 * num_quantised - config.num_layers * config.hidden_size * 4  # a byte for four, and the scales
    assert plain.num_bytes("float32", True) - tally.num_bytes("float32", True) == saved


def test_without_integer_kernels_the_result_is_equal(tmp_path: pathlib.Path) -> None:
    folder, _ = quantised(checkpoint("llama"), tmp_path, "_proj")
    dense = load_model(folder, load_model_config(folder), "float32", CpuPlatform(None), weights="dense")
    assert isinstance(dense, Decoder)
    torch.testing.assert_close(
        logits_of(folder, dense), logits_of(folder, load_int8(folder, "float32")), atol=3e-4, rtol=1e-4
    )
