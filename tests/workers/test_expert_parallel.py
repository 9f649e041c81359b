"""`engine.expert_parallel`: ranks that divide the experts of a layer compute what one rank does.

`test_tensor_parallel.py` has engines over processes; here ranks are threads, whose logits are compared.
"""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from manta.workers.option_support import check_options
from manta.workers.parallel.split import check_num_ranks, experts_of_rank, shard_config
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.torch_worker.loader import load_model
from tests.quantised_checkpoints import quantised_pair
from tests.workers import test_gguf_architectures as gguf_cases
from tests.workers.test_layer_kinds import CASES, folder_of
from tests.workers.test_quantised_formats import FORMATS
from tests.workers.test_quantised_linear import needs_kernels
from tests.workers.test_quantised_ranks import MIXERS, OTHER_MIXERS, logits_alone, logits_of_ranks, logits_of_shares
from tests.workers.thread_group import ThreadGroup

NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")
NOT_SPLIT = "zaya"
"""A family whose convolutions of queries and keys ranks do not split."""
FAMILIES = [
    name for name, case in CASES.items() if any(case.options.get(number) for number in NUMBERS) and name != NOT_SPLIT
]
"""Every other case with experts."""
SIZES = MIXERS | OTHER_MIXERS
"""Sizes of what ranks split beside the experts, where those of a case are not multiples of 16."""
UNEVEN: dict[str, dict[str, int]] = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 33},
    "mixtral": {"num_local_experts": 7},
    "gpt_oss": {"num_local_experts": 5},
    "gemma4, experts": {"num_experts": 6},
}
"""Numbers of experts that four ranks do not divide evenly, and a width that ranks cannot split."""


def assert_same_tokens(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_ranks_compute_what_one_does(kind: str) -> None:
    """Shared experts, which ranks split by width, are added once."""
    folder = folder_of(kind, **SIZES.get(kind, {}))
    assert_same_tokens(logits_of_ranks(folder, 2, expert_parallel=True), logits_alone(folder))


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [4, 2])
@pytest.mark.parametrize("kind", UNEVEN)
def test_ranks_need_not_have_equally_many_experts(kind: str, num_ranks: int) -> None:
    folder = folder_of(kind, **UNEVEN[kind])
    assert_same_tokens(logits_of_ranks(folder, num_ranks, expert_parallel=True), logits_alone(folder))


@needs_kernels
@pytest.mark.few(2)
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_exact_ranks_give_the_bits_of_one(kind: str, weights: str) -> None:
    """The results of a token's experts are added in the order of the experts, whichever rank has them."""
    folder = folder_of(kind, **SIZES.get(kind, {}))
    expected = logits_alone(folder, weights, exact=True)
    assert torch.equal(logits_of_ranks(folder, 2, weights, exact=True, expert_parallel=True), expected)


@needs_kernels
@pytest.mark.few(1)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_stored_in_any_format(name: str, tmp_path: pathlib.Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 5}
    stored = FORMATS[name]
    quantised, dense = quantised_pair(folder_of("qwen3_moe", **sizes), tmp_path, stored.quantise, stored.config)
    expected = logits_alone(quantised, "int8", exact=True)
    assert torch.equal(logits_of_ranks(quantised, 2, "int8", exact=True, expert_parallel=True), expected)
    if "act-order" not in name and "version 2" not in name:  # ranks cannot divide the inputs of attention's outputs
        assert_same_tokens(logits_of_ranks(quantised, 2, expert_parallel=True), logits_alone(dense))


@needs_kernels
@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3moe", "Q8_0"), ("gpt-oss", "MXFP4"), ("mixtral", "Q4_0"), ("qwen35moe", "F16")]
)
def test_experts_are_read_from_gguf_files(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    def kind_of(tensor: str) -> str:
        return kind if tensor.endswith("_exps.weight") else "F32"

    folder = resolve_model_folder(str(gguf_cases.convert(gguf_cases.original(name), tmp_path / "model.gguf", kind_of)))
    assert_same_tokens(logits_of_ranks(folder, 2, expert_parallel=True), logits_alone(folder))
    expected = logits_alone(folder, "int8", exact=True)
    assert torch.equal(logits_of_ranks(folder, 2, "int8", exact=True, expert_parallel=True), expected)


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def without_experts(folder: pathlib.Path, to: pathlib.Path, held: range) -> pathlib.Path:
    """Returns a copy of a checkpoint without the experts that a rank does not hold. They have no tensors, or no numbers
    in a tensor of all.
    """
    shutil.copytree(folder, to)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        place = _EXPERT.search(name)
        if place is not None and int(place[1]) not in held:
            continue
        if place is None and ".experts." in name and tensor.dim() > 1:
            tensor[[expert for expert in range(len(tensor)) if expert not in held]] = torch.nan
        tensors[name] = tensor
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mixtral", "llama4", "granite_hybrid", "jamba"])
def test_a_rank_reads_its_own_experts_only(kind: str, tmp_path: pathlib.Path) -> None:
    folder = folder_of(kind, **SIZES.get(kind, {}))
    config = load_model_config(folder)
    assert config.experts is not None
    folders = [
        without_experts(folder, tmp_path / str(rank), experts_of_rank(config.experts.num_experts, rank, 2))
        for rank in range(2)
    ]
    found = logits_of_shares(folders, expert_parallel=True)
    assert torch.equal(found, logits_of_ranks(folder, 2, expert_parallel=True))


def test_a_tensor_of_no_part_of_the_model_is_still_refused(tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(folder_of("qwen3_moe"), tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.4.gate_proj.weight"
    save_file(tensors | {name: torch.zeros(32, 64)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"holds 1 tensors that its architecture does not have: {name}"):
        load_model(
            folder,
            load_model_config(folder),
            "float32",
            CpuPlatform(1),
            group=ThreadGroup.of(2)[0],
            expert_parallel=True,
        )


def shares(num_experts: int, num_ranks: int) -> Iterator[range]:
    return (experts_of_rank(num_experts, rank, num_ranks) for rank in range(num_ranks))


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(30, 8), (8, 8), (5, 2), (128, 3)])
def test_ranks_divide_experts_as_evenly_as_can_be(num_experts: int, num_ranks: int) -> None:
    assert [expert for share in shares(num_experts, num_ranks) for expert in share] == list(range(num_experts))
    sizes = [len(share) for share in shares(num_experts, num_ranks)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_the_width_of_an_expert_may_be_any() -> None:
    config = load_model_config(folder_of("qwen3_moe", **UNEVEN["qwen3_moe"]))
    with pytest.raises(ModelError, match="2 ranks cannot split the intermediate size 33"):
        check_num_ranks(config, 2)
    share = shard_config(config, 2, expert_parallel=True)
    assert share.experts == config.experts
    assert share.num_heads == config.num_heads // 2


@pytest.mark.parametrize(
    ("kind", "device", "num_ranks", "words"),
    [
        ("qwen3_moe", "tpu", 2, "expert_parallel is for CPUs and GPUs, and the device is tpu"),
        ("gemma2", "cpu", 1, "expert_parallel divides experts, and this Gemma2ForCausalLM has none; set expert_para"),
        ("qwen3_moe", "cpu", 1, None),
        ("qwen3_moe", "tpu", 1, None),
        ("qwen3_moe", "cuda", 4, None),
    ],
)
def test_what_cannot_divide_experts_is_refused(kind: str, device: str, num_ranks: int, words: str | None) -> None:
    """With one rank the option has no effect, as vLLM's. A draft model, which ranks do not split, needs no experts."""
    config, draft = (load_model_config(folder_of(name)) for name in (kind, "gemma2"))
    options = ModelOptions(model=str(folder_of(kind)), expert_parallel=True, tensor_parallel_size=num_ranks)
    if words is None:
        check_options(options, device, config, draft)
        return
    with pytest.raises(ModelError, match=words):
        check_options(options, device, config)


def test_more_ranks_than_experts_are_refused_with_remedies() -> None:
    config = load_model_config(folder_of("mixtral", num_local_experts=3, num_experts_per_tok=2))
    words = "4 ranks cannot split the 3 experts, of .* to one of 1, 2, or set expert_parallel to false"
    with pytest.raises(ModelError, match=words):
        check_num_ranks(config, 4, expert_parallel=True)
