"""What a whole engine on the CUDA platform launches: nothing is compiled once requests are served, and a layer takes no
more kernels than it did.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from manta.cluster.llm import SamplingParams
from manta.structured.logits_processors import LogitsProcessorSpec
from manta.workers.kernels.protocol import KVCaches
from manta.workers.kernels.triton import launch
from manta.workers.kernels.triton.graphs import GraphedLayers
from manta.workers.kernels.triton.metadata import DeviceMetadata, Layout
from manta.workers.step import StepInput
from manta.workers.torch_worker import sampler as torch_sampling
from manta.workers.torch_worker.model_runner import ModelRunner
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.workers.kernels.triton_compile import KERNEL_MODULES, LAUNCHED
from tests.workers.test_cuda_platform import make_llm
from tests.workers.test_layer_kinds import folder_of
from tests.workers.triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="watches the interpreter's kernels")

Form = tuple[Any, ...]
"""A kernel's name, and all that Triton compiles another form of it for."""
Call = tuple[Any, ...]
"""A kernel's name, its grid, and all arguments that a captured graph keeps: everything but what tensors hold."""
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launches:
    """Stands in the place of every kernel that the host launches: notes the launch, and runs the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forms: set[Form] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.read: list[StorageWeakRef] = []
        """The memory of every tensor that a kernel was given."""
        self.calls: list[Call] = []
        """Every launch, in order."""
        for module in KERNEL_MODULES:
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
            self._launches.calls.append(call_of(self._name, grid, arguments, named))
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


def call_of(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> Call:
    values = [*arguments, *named.values()]
    return name, grid, tuple(each.shape if isinstance(each, torch.Tensor) else each for each in values)


def requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, some of which begin alike, and parameters of every kind."""
    generator = np.random.default_rng(seed)
    shared = generator.integers(3, VOCAB_SIZE, 24).tolist()
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
        (shared if index % 2 else []) + generator.integers(3, VOCAB_SIZE, 1 + int(generator.integers(1, 8))).tolist()
        for index in range(len(kinds))
    ]
    return prompts, [SamplingParams(**{"max_tokens": 3, "seed": seed, **kind}) for kind in kinds]


class Served(NamedTuple):
    """What an engine gave and launched that served `requests` on the overlapped loop."""

    answers: list[Any]
    """Tokens and log-probabilities."""
    compiled_at_start: set[Form]
    compiled: set[Form]


def serve(
    monkeypatch: pytest.MonkeyPatch, dtype: str = "bfloat16", family: str = "llama", folder: pathlib.Path | None = None
) -> Served:
    launches = Launches(monkeypatch)
    llm = make_llm(
        monkeypatch,
        str(folder or checkpoint(family, num_hidden_layers=1)),
        dtype=dtype,
        max_num_sequences=4,
        logits_processors={"automaton": None},
    )
    assert llm.engine.executor.depth == 1
    at_start = set(launches.forms)
    outputs = llm.generate(*requests(2), use_tqdm=False)
    choices = [choice for output in outputs for choice in output.outputs]
    assert all(choice.error is None for choice in choices)
    answers = [(choice.token_ids, choice.logprobs) for choice in choices] + [o.prompt_logprobs for o in outputs]
    return Served(answers, at_start, launches.forms)


@pytest.fixture(scope="module")
def served(plugin: None, cheap_groups: None) -> Served:
    with pytest.MonkeyPatch.context() as patch:
        return serve(patch)


@pytest.mark.prove  # compiles for a GPU for ten seconds
def test_nothing_is_compiled_while_requests_are_served(served: Served) -> None:
    assert served.compiled_at_start
    assert not served.compiled - served.compiled_at_start


@pytest.mark.prove
@pytest.mark.usefixtures("plugin", "cheap_groups")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_nothing_is_compiled_for_float32_either(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_float32 = serve(monkeypatch, "float32", family)
    assert not of_float32.compiled - of_float32.compiled_at_start


@pytest.mark.prove
@pytest.mark.usefixtures("plugin", "cheap_groups")
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba", "kimi_linear"])
def test_nothing_is_compiled_for_recurrent_layers_either(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = serve(monkeypatch, folder=folder_of(name))
    assert not recurrent.compiled - recurrent.compiled_at_start


def test_a_decode_layer_is_six_kernels_beside_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rotation with the cache, attention with its merge, norm, activation. The figure may fall and not rise."""
    launches, totals = Launches(monkeypatch), []
    for num_layers in (1, 2):
        folder = str(checkpoint("llama", num_hidden_layers=num_layers))
        llm = make_llm(monkeypatch, folder, mixed_tokens=2, max_num_sequences=1)
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
    llm = make_llm(monkeypatch, str(checkpoint("llama", num_hidden_layers=1)), mixed_tokens=2)
    gc.collect()
    assert len(outer) > 20
    assert not [each for each in outer if each.expired()]
    del llm


@pytest.mark.usefixtures("cheap_groups")
@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_graph_launches_the_same_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay launches the grids and numbers of the capture, whose step was empty and as long as a step can be. So
    none of them may follow from what the host knows of a step.
    """
    launches = Launches(monkeypatch)
    captured: dict[tuple[Layout, bool], list[Call]] = {}
    replayed: collections.Counter[tuple[Layout, bool]] = collections.Counter()
    differences: list[Any] = []
    call = GraphedLayers.__call__

    def watched(
        self: GraphedLayers,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: DeviceMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:
        key = None if metadata.layout is None else (metadata.layout, metadata.prefix_rows is not None)
        launches.calls.clear()
        hidden = call(self, residual.clone(), cos_sin, metadata, kv_caches)
        if key is None:
            return hidden
        if self.capture is not None:
            captured[key] = launches.calls[: len(launches.calls) // 2]  # the capture, and then its first replay
        elif key in self._graphs:
            graph = self._graphs[key]
            own = dataclasses.replace(
                graph.metadata,
                max_query_len=metadata.max_query_len,
                max_context_len=metadata.max_context_len,
                total_context_len=metadata.total_context_len,
            )
            launches.calls.clear()
            padded = torch.zeros_like(graph.residual)
            padded[: len(residual)] = residual
            if not torch.equal(self._run_layers(padded, cos_sin, own, kv_caches)[: len(residual)], hidden):
                differences.append((key, "hidden states"))
            if launches.calls != captured[key]:
                differences.append((key, launches.calls, captured[key]))
            replayed[key] += 1
        return hidden

    monkeypatch.setattr(GraphedLayers, "__call__", watched)
    llm = make_llm(
        monkeypatch,
        str(checkpoint(family, num_hidden_layers=1)),
        dtype="float32",
        max_num_sequences=4,
        max_model_len=80,
    )
    shared = np.random.default_rng(3).integers(3, VOCAB_SIZE, 70).tolist()
    prompts = [shared, [*shared, 5], [7, 8], [*shared, 6, 7], [*shared, 8], [9] * 5]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 5 for output in outputs)
    assert not differences
    assert {has_groups for _, has_groups in replayed} == {False, True}
    assert {layout.most_tokens is None for layout, _ in replayed} == {False, True}
    assert replayed.total() > 5


class Copies:
    """Copies from the device that hold nonsense until somebody waits for an event that was recorded after them."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_filled = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(tensor, 1)  # the status of NaN, and a token that nobody drew
        self._pending.append((copy, tensor.clone()))
        return copy

    def record_event(self, device: torch.device) -> Event:
        return Event(self, len(self._pending))

    def fill(self, count: int) -> None:
        with torch.inference_mode():
            for copy, value in self._pending[:count]:
                copy.copy_(value)
        self.num_filled = max(self.num_filled, count)


class Event:
    def __init__(self, copies: Copies, count: int) -> None:
        self._copies = copies
        self._count = count

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._copies.fill(self._count)


def read_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on a copy from the device is nonsense until its event was waited for. Returns a check of the order in
    which steps were launched and drawn.
    """
    order: list[str] = []
    copies = Copies()
    monkeypatch.setattr(torch_sampling, "to_host", copies.to_host)
    monkeypatch.setattr(launch, "record_event", copies.record_event)
    forward, draw = ModelRunner._forward, ModelRunner._draw

    def watched_forward(self: ModelRunner, step: StepInput) -> torch.Tensor:
        order.append("forward")
        if step.sample_points:
            order.append("to draw")
        return forward(self, step)

    def watched_draw(self: ModelRunner, *arguments: Any) -> Any:
        order.append("draw")
        return draw(self, *arguments)

    monkeypatch.setattr(ModelRunner, "_forward", watched_forward)
    monkeypatch.setattr(ModelRunner, "_draw", watched_draw)

    def check() -> None:
        assert copies.num_filled > 20
        drawing = [index for index, what in enumerate(order) if what == "to draw"]
        assert len(drawing) > 5
        assert [order[index + 1] for index in drawing] == ["draw"] * len(drawing)

    return check


def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on new memory holds NaN and the smallest integers. Returns a check that some was made."""
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

    def check() -> None:
        assert poisoned > 100

    return check


HARDSHIPS = {"late copies in poisoned memory": (read_late, poison), "late copies": (read_late,), "poison": (poison,)}
"""The first one has the others in it, which tell apart what fails there."""


@pytest.mark.usefixtures("plugin", "cheap_groups")
@pytest.mark.prove
@pytest.mark.parametrize("name", HARDSHIPS)
def test_steps_are_read_in_order_and_no_kernel_reads_memory_that_nobody_wrote(
    name: str, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    """All tokens and log-probabilities stay the same."""
    checks = [begin(monkeypatch) for begin in HARDSHIPS[name]]
    assert serve(monkeypatch).answers == served.answers
    for check in checks:
        check()
