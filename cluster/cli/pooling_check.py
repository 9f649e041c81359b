"""`manta check` and `manta serve` check models that pool with these functions, and describe them."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

from manta.cluster.config import EngineConfig
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.errors import RequestRefused
from manta.cluster.text.chat_template import TemplateError, template_process
from manta.cluster.text.message_prompts import MessagePrompts
from manta.cluster.text.pooled_texts import prompt_of
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.host import num_cores
from manta.workers.checkpoints.memory import num_elements
from manta.workers.model_info import ModelInfo
from manta.workers.models.model_config import ModelError
from manta.workers.pooling_info import PoolingInfo
from manta.workers.pooling_options import check_pooling_options

_TRIAL_TOKENS = 48


def check_pooling(engine: EngineConfig, folder: pathlib.Path, pooling: PoolingInfo) -> None:
    """Checks what needs no torch: the files and the options of a model that pools. Raises `ModelError`."""
    check_pooling_options(engine)
    num_elements(folder)  # raises unless every file is there and complete
    if pooling.messages is not None:
        check_messages(engine, folder, pooling)


def check_messages(engine: EngineConfig, folder: pathlib.Path, pooling: PoolingInfo) -> None:
    """Checks that the model's template writes the texts that it is to answer. Raises `ModelError`."""
    assert pooling.messages is not None
    prompts = MessagePrompts(Tokenizer(engine.tokenizer or folder), pooling.messages, prompt_of(pooling, None))
    try:
        prompts.check(2 if pooling.scores_pairs else 1, "model")
    except (RequestRefused, TemplateError) as error:
        raise ModelError(f"{folder}: {error}") from error
    finally:
        template_process().close()  # this process renders no more


def pooling_rows(engine: EngineConfig) -> Iterator[str]:
    """Loads the model, runs a step and yields what a user wants to know, a line each. Raises `ModelError`."""
    from manta.cluster.engine.pooling_engine import PoolingEngine  # it imports torch

    running = PoolingEngine(engine)
    model = running.model
    length = min(_TRIAL_TOKENS, model.max_model_len)
    text = PooledInput([index % model.vocab_size for index in range(length)], length)
    results: list[PoolingResult] = []
    began = time.perf_counter()
    running.add(PoolingRequest(request_id="check", texts=[text]), lambda _, result: results.append(result))
    while not results:
        running.step()
    seconds = time.perf_counter() - began
    if results[0].refusal is not None:
        raise ModelError("a step gives no finite numbers")
    info = model.pooling
    assert info is not None
    if info.messages is not None:
        check_messages(engine, pathlib.Path(model.folder), info)
    rows = {
        "model": model.folder,
        "task": describe(info),
        "dtype": model.dtype,
        "device": f"{model.platform}, {engine.num_threads or num_cores()} threads",
        "parameters": f"{num_elements(pathlib.Path(model.folder)) / 1e6:,.1f} M",
        "step": f"ran {length} tokens in {seconds * 1000:.3g} ms (kernels: {model.kernels})",
        "longest": f"{model.max_model_len:,} tokens a text",
    }
    if info.prompts:
        rows["prompts"] = ", ".join(f"{name} ({text!r})" for name, text in info.prompts.items())
    yield from (f"{name:<13} {text}" for name, text in rows.items())


def describe(info: PoolingInfo) -> str:
    """Returns one line: what the model answers, and how."""
    if info.task == "classify":
        texts = "a pair of texts" if info.messages is not None else "a text or a pair"
        what = f"a score for {texts}" if info.dimension == 1 else f"{info.dimension} labels"
        return f"{what}, by {info.source} ({info.activation})"
    steps = [" and ".join(info.modes), *(f"dense {layer.out_features}" for layer in info.dense)]
    steps += ["normalised"] if info.normalises else []
    return f"vectors of {info.dimension} numbers: {', '.join(steps)} ({info.source})"


def pooling_message(model: ModelInfo) -> str:
    """Returns the paragraph of `manta serve` about a model that pools."""
    assert model.pooling is not None
    return (
        f"Loaded in {model.load_seconds:.1f} s as {model.dtype} on {model.platform} (kernels: {model.kernels}). "
        f"It answers with {describe(model.pooling)}. The longest text is {model.max_model_len:,} tokens."
    )
