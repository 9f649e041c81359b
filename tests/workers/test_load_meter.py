"""How far a load is: the fraction of the stored bytes of each model that its loader has read, beside safetensors' own
reading of the file.
"""

from __future__ import annotations

import itertools
import pathlib

import pytest
import safetensors.torch

from manta.cluster.llm import LLM
from manta.workers.load_meter import LOAD_METER, SPEC_MODEL, TEXT_MODEL, LoadMeter, LoadProgress
from tests.checkpoints import checkpoint


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[LoadProgress]:
    """What the meter says after each tensor, as another thread could read it."""
    told: list[LoadProgress] = []
    add = LoadMeter.add

    def add_and_tell(meter: LoadMeter, num_bytes: int) -> None:
        add(meter, num_bytes)
        assert meter.progress is not None
        told.append(meter.progress)

    monkeypatch.setattr(LoadMeter, "add", add_and_tell)
    return told


def stored(folder: pathlib.Path) -> list[int]:
    """Returns the bytes of the tensors of a folder."""
    return [tensor.nbytes for tensor in safetensors.torch.load_file(folder / "model.safetensors").values()]


def steps(values: list[float]) -> list[float]:
    """Returns the fractions by which values grow, in order of size."""
    return sorted(after - before for before, after in itertools.pairwise([0.0, *values]))


@pytest.mark.parametrize("drafts", [False, True])
def test_each_tensor_moves_the_fraction_of_its_model(drafts: bool, told: list[LoadProgress]) -> None:
    folders = {TEXT_MODEL: checkpoint("llama"), SPEC_MODEL: checkpoint("llama", num_hidden_layers=1)}
    if not drafts:
        del folders[SPEC_MODEL]
    speculative = {"proposers": ["draft"], "draft_model": str(folders[SPEC_MODEL])} if drafts else None
    llm = LLM(str(folders[TEXT_MODEL]), dtype="float32", kv_cache_bytes=1 << 20, speculative=speculative)
    assert LOAD_METER.progress == LoadProgress((*folders,), [*folders][-1], 1.0)
    assert {each.stages for each in told} == {(*folders,)}
    for stage, group in itertools.groupby(told, key=lambda each: each.current):
        sizes = stored(folders.pop(stage))
        grown = steps([each.value for each in group])
        assert grown == pytest.approx(sorted(size / sum(sizes) for size in sizes))
    assert not folders
    del llm


def test_a_decoder_of_transformers_moves_the_fraction_too(told: list[LoadProgress]) -> None:
    """Its linears count, each of which is packed by itself."""
    folder = checkpoint("biogpt")
    llm = LLM(str(folder), dtype="float32", kv_cache_bytes=1 << 20)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    sizes = [tensor.nbytes for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name]
    assert {each.stages for each in told} == {(TEXT_MODEL,)}
    assert told[-1].value == 1.0
    assert len(told) >= len(sizes) > 1
    assert min(steps([each.value for each in told])) > 0
    del llm
