"""Judges how Manta serves a tiny model: transformers' tokens in every history of the engine, or a refusal by name.

The offline `LLM` generates greedily. transformers then computes each prompt with its answer once, without a cache: the
tokens are its own if each is the most probable after those before it.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any, Literal

import msgspec
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelConfig, ModelError
from tests.checkpoints import on_one_thread
from tests.engine.histories import NGRAM, prompts
from tests.families.tiny import architecture_of, make_model, tiny_config

Result = Literal["native", "through transformers", "refused", "refused late", "left out", "different", "died"]
NUM_TOKENS = 24
BLOCK = 16
NUM_FEW_BLOCKS = 9
"""Blocks of the cache that makes the engine preempt: the longest sequence takes six."""
MOST_DIFFERENCE = 1e-4
"""Largest difference of a log-probability, in parts of the range of the logits at its position."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
HISTORIES: dict[str, dict[str, Any]] = {
    "cold": {},
    "in chunks, preempted": {"max_num_batched_tokens": 11, "few_blocks": True},
    "n-gram drafts": {"speculative": NGRAM},
}
"""Options of an engine. Each answers twice, the second time from its prefix cache."""


class Verdict(msgspec.Struct, kw_only=True):
    """The result for one model type."""

    model_type: str
    architecture: str
    result: Result
    reason: str = ""
    """The sentence of a refusal, or the first history that differs and how."""
    difference: float | None = None
    """Largest difference of a log-probability of the cold run, as `MOST_DIFFERENCE`."""
    seconds: float = 0.0


class Different(Exception):
    """An answer is not that of transformers. Names the history."""


def judge(model_type: str) -> Verdict:
    """Makes a tiny model of a type and asks it. Raises whatever neither Manta nor transformers says in a sentence."""
    began = time.monotonic()
    verdict = Verdict(model_type=model_type, architecture=architecture_of(model_type), result="left out")
    with tempfile.TemporaryDirectory(prefix="manta-family-") as name:
        _judge(verdict, pathlib.Path(name))
    verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


def _judge(verdict: Verdict, folder: pathlib.Path) -> None:
    try:
        config = tiny_config(verdict.model_type)
    except Exception as error:  # transformers' classes raise anything
        verdict.reason = f"transformers makes no tiny configuration: {_in_a_line(error)}"
        return
    config.architectures = [verdict.architecture]
    config.save_pretrained(folder)
    try:
        load_model_config(folder)
    except ModelError as error:
        verdict.result, verdict.reason = "refused", _in_a_line(error, folder)
        return
    try:
        model = make_model(verdict.model_type, config, folder)
    except Exception as error:
        verdict.reason = f"transformers makes no tiny model: {_in_a_line(error)}"
        return
    served = load_model_config(folder)
    try:
        with on_one_thread():
            verdict.difference = check_histories(folder, served, model)
    except ModelError as error:
        verdict.result, verdict.reason = "refused late", _in_a_line(error, folder)
    except Different as error:
        verdict.result, verdict.reason = "different", str(error)
    else:
        verdict.result = "native" if served.native else "through transformers"


def check_histories(folder: pathlib.Path, config: ModelConfig, model: Any) -> float:
    """Returns the largest difference of a log-probability. Raises `Different` if any history gives other tokens than
    transformers' `model`.
    """
    difference = 0.0
    for history, options in HISTORIES.items():
        llm = make_llm(folder, config, **options)
        answers = ask(llm, logprobs=0, prompt_logprobs=0) if history == "cold" else ask(llm)
        difference = max(difference, *(check_answer(model, history, *answer) for answer in answers))
        tokens = [output for _, output, _ in answers]
        if [output for _, output, _ in ask(llm)] != tokens:
            raise Different(f"{history}: other tokens from the prefix cache")
        if history == "cold":
            for _, output, _ in ask(llm, n=4):
                if output not in tokens:
                    raise Different("n = 4: other tokens")
            check_continued(llm, tokens)
        del llm
    return difference


def check_continued(llm: LLM, tokens: list[list[int]]) -> None:
    """Another engine goes on where one failed: the prompt and some of the answer are its prompt."""
    for kept in (1, 11):
        continued = [[*prompt, *output[:kept]] for prompt, output in zip(prompts(), tokens, strict=True)]
        params = SamplingParams(**GREEDY | {"max_tokens": NUM_TOKENS - kept})
        outputs = llm.generate(continued, params, use_tqdm=False)
        if [each.outputs[0].token_ids for each in outputs] != [output[kept:] for output in tokens]:
            raise Different(f"continued after {kept} tokens: other tokens")


def make_llm(folder: pathlib.Path, config: ModelConfig, few_blocks: bool = False, **options: Any) -> LLM:
    block_bytes = BLOCK * config.kv_bytes_per_token("float32")
    num_bytes = 64 * config.state_bytes + (NUM_FEW_BLOCKS if few_blocks else 256) * block_bytes
    sizes = {"kv_cache_bytes": num_bytes, "max_num_sequences": 8, "typical_sequence_tokens": 1}
    return LLM(str(folder), dtype="float32", num_threads=1, block_size=BLOCK, **sizes | options)


Answer = tuple[list[int], list[int], list[float]]
"""A prompt, the tokens after it, and the log-probabilities of all tokens but the first, if they were asked for."""


def ask(llm: LLM, **fields: Any) -> list[Answer]:
    """Returns each choice of each prompt."""
    answers: list[Answer] = []
    for output in llm.generate(prompts(), SamplingParams(**GREEDY | fields), use_tqdm=False):
        for choice in output.outputs:
            if choice.error is not None:
                raise Different(choice.error)
            entries = [*(output.prompt_logprobs or [])[1:], *(choice.logprobs or [])]
            answers.append((output.prompt_token_ids, choice.token_ids, [each.logprob for each in entries if each]))
    llm.engine.step()
    llm.engine.check_integrity()
    return answers


@torch.inference_mode()
def check_answer(model: Any, history: str, prompt: list[int], output: list[int], logprobs: list[float]) -> float:
    """Returns the largest difference of a log-probability. Raises `Different` if a token is not the most probable."""
    tokens = torch.tensor([[*prompt, *output]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    expected = logits[len(prompt) - 1 :].argmax(-1).tolist()
    if output != expected:
        first = next(place for place, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1])
        raise Different(f"{history}: other tokens from the {first + 1}. after a prompt of {len(prompt)}")
    if not logprobs:
        return 0.0
    own = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    differences = (own - torch.tensor(logprobs)).abs() / (logits.amax(-1) - logits.amin(-1))
    if not differences.max() <= MOST_DIFFERENCE:
        raise Different(f"{history}: a log-probability is off by {differences.max():.1e} of the logits' range")
    return float(differences.max())


def _in_a_line(error: Exception, folder: pathlib.Path | None = None) -> str:
    """Returns what an error says, with its kind if it is not Manta's."""
    kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
    words = " ".join(str(error).split())
    return (kind + (words if folder is None else words.replace(f"{folder}/", "")))[:300]
