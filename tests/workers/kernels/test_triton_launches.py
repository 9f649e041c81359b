"""What a whole engine on the CUDA platform launches: nothing is compiled once requests are served, and a layer takes no
more kernels than it did.
"""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cluster.llm import SamplingParams
from structured.logits_processors import LogitsProcessorSpec
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.conftest import PROVE
from tests.workers.kernels.triton_compile import LAUNCHED
from tests.workers.test_cuda_platform import make_llm
from tests.workers.triton_device import DEVICE
from workers.kernels.triton import attention, edits, launch, rope, rows, sampler

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="watches the interpreter's kernels")

Form = tuple[Any, ...]
"""A kernel's name, and all that Triton compiles another form of it for."""
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launches:
    """Stands in the place of every kernel that the host launches: notes the launch, and runs the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forms: set[Form] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.read: list[StorageWeakRef] = []
        """The memory of every tensor that a kernel was given."""
        for module in (attention, edits, rope, rows, sampler):
            for name, kernel in list(vars(module).items()):
                if name.startswith(LAUNCHED) and hasattr(kernel, "arg_names"):
                    monkeypatch.setattr(module, name, Watched(self, name, kernel))


class Watched:
    def __init__(self, launches: Launches, name: str, kernel: Any) -> None:
        self._launches = launches
        self._name = name
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            tensors = (each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor))
            self._launches.read += (StorageWeakRef(each.untyped_storage()) for each in tensors)
            self._launches.counts[self._name] += 1
            self._launches.forms.add(form_of(self._name, self._kernel, arguments, named))
            self._kernel[grid](*arguments, **named)

        return run


def form_of(name: str, kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Form:
    """Returns what decides which compiled form of a kernel a launch takes: see `specialize` of Triton's `jit`."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    unspecialised = kernel.kwargs["do_not_specialize"] or ()
    form: list[Any] = [name]
    for key, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            form.append((key, str(value.dtype), value.data_ptr() % 16 == 0))
        elif key.isupper() or key in OPTIONS:
            form.append((key, value))
        elif isinstance(value, int) and key not in unspecialised:
            form.append((key, "1" if value == 1 else value % 16 == 0))
        else:
            form.append((key, type(value).__name__))
    return tuple(form)


def requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, some of which begin alike, and parameters of every kind."""
    generator = np.random.default_rng(seed)
    shared = generator.integers(3, VOCAB_SIZE, 40).tolist()
    processor = {"logits_processors": (LogitsProcessorSpec(name="automaton", arguments={"num_states": 97}),)}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 9},
        {"repetition_penalty": 1.2, "min_p": 0.1},
        {"logit_bias": {7: 2.0}, "min_tokens": 3},
        {"allowed_token_ids": (5, 6, 7, 8), "logprobs": 3},
        {"bad_words_token_ids": ((7,), (8, 9)), "presence_penalty": 0.3},
        {"n": 2, "frequency_penalty": 0.5},
        processor,
        processor | {"top_p": 0.8, "presence_penalty": 0.3},
        {"prompt_logprobs": 1},
    ]
    prompts = [
        (shared if index % 2 else []) + generator.integers(3, VOCAB_SIZE, 1 + int(generator.integers(1, 20))).tolist()
        for index in range(len(kinds))
    ]
    return prompts, [SamplingParams(**{"max_tokens": 3, "seed": seed, **kind}) for kind in kinds]


@pytest.mark.usefixtures("plugin", "cheap_groups")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if PROVE else ["bfloat16"])
def test_nothing_is_compiled_while_requests_are_served(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    llm = make_llm(
        monkeypatch,
        str(checkpoint("llama", num_hidden_layers=1)),
        dtype=dtype,
        max_num_sequences=4,
        logits_processors={"automaton": None},
    )
    at_start = set(launches.forms)
    outputs = llm.generate(*requests(1), use_tqdm=False)
    assert all(choice.error is None for output in outputs for choice in output.outputs)
    assert not launches.forms - at_start


def test_a_layer_of_a_decode_step_is_six_kernels_beside_its_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rotation with the cache, attention with its merge, norm, activation. The figure may fall and not rise."""
    launches, totals = Launches(monkeypatch), []
    for num_layers in (1, 2):
        llm = make_llm(monkeypatch, str(checkpoint("llama", num_hidden_layers=num_layers)), max_num_sequences=1)
        llm.add_request("0", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        for _ in range(2):
            llm.step()
        launches.counts.clear()
        llm.step()
        totals.append(launches.counts.total())
        llm.abort("0")
    assert totals[1] - totals[0] <= 6


@pytest.mark.usefixtures("cheap_groups")
def test_a_graph_keeps_all_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the same memory as the capture. What was made before the capture must live as long as the graph;
    what is made within it lies in the graph's own pool.
    """
    launches, outer = Launches(monkeypatch), list[StorageWeakRef]()
    capture = launch.GraphCapture.capture

    def watched(self: launch.GraphCapture, run: Callable[[], torch.Tensor]) -> Any:
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        before = {StorageWeakRef(each.untyped_storage()).cdata for each in tensors}
        launches.read.clear()
        captured = capture(self, run)
        outer.extend(each for each in launches.read if each.cdata in before)
        return captured

    monkeypatch.setattr(launch.GraphCapture, "capture", watched)
    llm = make_llm(monkeypatch, str(checkpoint("llama", num_hidden_layers=1)), max_num_sequences=2)
    gc.collect()
    assert len(outer) > 20
    assert not [each for each in outer if each.expired()]
    del llm


@pytest.mark.usefixtures("plugin", "cheap_groups")
def test_no_kernel_reads_memory_that_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN and the smallest integers, and all tokens and log-probabilities stay the same."""

    def answers() -> list[Any]:
        llm = make_llm(
            monkeypatch,
            str(checkpoint("llama", num_hidden_layers=1)),
            max_num_sequences=4,
            logits_processors={"automaton": None},
        )
        outputs = llm.generate(*requests(2), use_tqdm=False)
        choices = [choice for output in outputs for choice in output.outputs]
        assert all(choice.error is None for choice in choices)
        return [(choice.token_ids, choice.logprobs) for choice in choices] + [o.prompt_logprobs for o in outputs]

    expected = answers()
    poisoned = 0

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, **named: Any) -> torch.Tensor:
            nonlocal poisoned
            tensor = make(*arguments, **named)
            if tensor.numel():
                poisoned += 1
                tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
            return tensor

        return made

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))
    assert answers() == expected
    assert poisoned > 100
