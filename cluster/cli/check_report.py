"""`CheckReport` holds what `manta check` found out about a model, and `report_rows` makes the lines that say it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from manta.workers.checkpoints.memory_check import gib

SEQUENCE_TOKENS = (1024, 8192, 131_072)
"""Lengths of sequences whose memory is reported."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that this model needs to be served here."""

    folder: str
    architecture: str
    native: bool
    wrapper: str | None = None
    """Architecture of the multimodal model of which this is the text decoder."""
    variants: tuple[str, ...] = ()
    """Variants of its layers, beyond Llama's."""
    runs_in_one_call: bool = False
    """Whether all layers are one call of compiled code, or one graph."""
    num_parameters: int
    checkpoint_dtype: str
    quantized: str | None = None
    """One line: what the checkpoint quantises how, and as what it is kept."""
    unquantized: str | None = None
    """One line: the matrices that a quantised checkpoint leaves as they are. None if it leaves none."""
    dtype: str
    device: str
    num_threads: int
    weight_bytes: int
    weights: str | None
    """Form of the linears' weights, as in `ModelInfo`."""
    kv_cache_bytes: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_cache_tokens: int
    kv_groups: str | None = None
    """One line: the groups of layers and the bytes of their blocks. None if all layers see every position."""
    states: str | None = None
    """One line: the recurrent states and their bytes. None if there are none."""
    draft_heads: str | None = None
    """One line: the draft heads in the checkpoint. None if there are none."""
    sequence_bytes: tuple[int, ...] = ()
    """Bytes of the KV cache that a sequence of each of `SEQUENCE_TOKENS` holds at most, with the two states of a decode
    step.
    """
    adapters: tuple[str, ...] = ()
    """A description of each adapter, in words."""
    experts: str | None = None
    """One line: how ranks divide experts. None if they split the width of each expert, or if there are none."""
    has_chat_template: bool
    stop_tokens: str
    """The tokens that end every answer, with their texts."""
    sampling: str | None = None
    """Sampling parameters of requests that name none; None for OpenAI's."""
    unused_keys: tuple[str, ...] = ()
    """Keys of the configuration that neither Manta nor transformers knows for this architecture."""
    unused_tensors: tuple[str, ...] = ()
    """Tensors of the files that belong to no module of the model."""
    max_model_len: int
    model_positions: int
    free_bytes: int
    step_seconds: float
    """Seconds of a step of `num_trial_layers` layers, the head and the sampler, for two sequences."""
    num_trial_layers: int = 1
    kernels: str
    advice: str | None


def report_rows(report: CheckReport) -> Iterator[str]:
    """Yields what a user wants to know, a line each."""
    how = "natively" if report.native else "through transformers"
    rows = {
        "model": report.folder,
        "architecture": f"{report.architecture}, run {how}; {report.num_parameters / 1e6:,.1f} M parameters",
        "dtype": f"{report.dtype} (the checkpoint's is {report.checkpoint_dtype})",
        "device": f"{report.device}, {report.num_threads} threads, {gib(report.free_bytes)} of memory free",
        "weights": gib(report.weight_bytes) + (f": {report.weights}" if report.weights else ""),
        "KV cache": f"{gib(report.kv_cache_bytes)}: {_held(report)}",
        "step": (
            f"ran {_layers(report)} and the head in {report.step_seconds * 1000:.3g} ms (kernels: {report.kernels})"
        ),
        "longest": f"{report.max_model_len:,} tokens a sequence (the model allows {report.model_positions:,})",
        "stop tokens": report.stop_tokens,
    }
    if report.sequence_bytes:
        sizes = zip(SEQUENCE_TOKENS, report.sequence_bytes, strict=True)
        rows["sequences"] = "take " + ", ".join(f"{gib(size)} with {tokens:,} tokens" for tokens, size in sizes)
    if report.kv_groups:
        rows["windows"] = report.kv_groups
    if report.states:
        rows["states"] = report.states
    if report.draft_heads:
        rows["draft heads"] = report.draft_heads
    if report.experts:
        rows["experts"] = report.experts
    if report.adapters:
        rows["adapters"] = "; ".join(report.adapters)
    if report.wrapper:
        rows["text only"] = f"the decoder of {report.wrapper}; requests with pictures are refused"
    if report.variants:
        form = "in one call" if report.runs_in_one_call else "kernel by kernel"
        rows["layers"] = f"run {form}, with {', '.join(report.variants)}"
    if report.sampling:
        rows["sampling"] = f"{report.sampling}, where a request says nothing (`--generation-config none` for 1)"
    if report.unused_keys:
        rows["keys unused"] = f"{', '.join(report.unused_keys)}: not known for this architecture"
    if report.unused_tensors:
        rows["tensors unused"] = f"{', '.join(report.unused_tensors)}: of no part of the model"
    if report.quantized:
        rows["quantised"] = report.quantized
    if report.unquantized:
        rows["not quantised"] = report.unquantized
    if not report.has_chat_template:
        rows["no chat"] = "its tokenizer brings no chat template: it serves /v1/completions only"
    if report.advice:
        rows["slower"] = f"than need be: {report.advice}"
    yield from (f"{name:<13} {text}" for name, text in rows.items())


def _held(report: CheckReport) -> str:
    """Returns what the KV cache holds."""
    if not report.kv_bytes_per_token:
        return "recurrent states only, of any number of tokens"
    size = f"{report.kv_bytes_per_token:,} bytes in {report.kv_cache_dtype}"
    return f"holds {report.kv_cache_tokens:,} tokens of {size}"


def _layers(report: CheckReport) -> str:
    return "one layer" if report.num_trial_layers == 1 else f"{report.num_trial_layers} layers"
