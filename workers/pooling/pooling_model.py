"""A model that pools, over transformers: texts as token ids in, vectors or the numbers of labels out.

The texts of a step lie end to end in one row (`packed_attention.py`), so that linears compute no padding. A model whose
attention cannot do that runs texts of equal length together, which needs no padding either; a probe at load decides.
Between two layers a step can be interrupted: it keeps nothing but its own activations, so another one may run inside.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import transformers
from torch import nn

from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.memory import weight_files
from manta.workers.checkpoints.transformers_support import first_position, first_sentence, longest_context, read_config
from manta.workers.models.model_config import ModelError
from manta.workers.platforms import Platform
from manta.workers.pooling import packed_attention
from manta.workers.pooling.embedding_head import ACTIVATIONS, EmbeddingHead, pool
from manta.workers.pooling.packed_linears import MakeLinear, pack_linears
from manta.workers.pooling_info import PoolingInfo, PoolingMode

logger = logger_of(__name__)

_PROBE_LENS = (11, 3)
"""Tokens of the two texts with which packing is tried. The first one gets longer than a short window."""
_LONGEST_PROBE = 600
"""Longest probe in tokens: windows above it are not tried, because no load should take seconds for it."""
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative error of packed hidden states that rounding explains."""
_UNUSED_HEADS = ("pooler.", "cls.", "lm_head.", "mlm_head.", "head.", "decoder.", "vocab_")
"""Beginnings of the names of tensors that a model has and a pooled vector does not need."""


class PooledText(msgspec.Struct, frozen=True):
    """One text, or a pair of texts in one sequence."""

    token_ids: Sequence[int]
    num_first: int
    """Tokens of the first text of a pair, with the special tokens around it; all tokens of a single text."""
    num_skipped: int = 0
    """Leading tokens of a named prompt."""


class PoolingModel:
    """Raises `ModelError` if the checkpoint cannot be loaded or transformers does not know it."""

    def __init__(
        self, folder: pathlib.Path, info: PoolingInfo, dtype: str, platform: Platform, is_exact: bool = False
    ) -> None:
        """With `is_exact` each text runs by itself, so that no bit of its answer depends on the others of its step:
        libraries choose the order of a product's sums by its shape.
        """
        self.info = info
        self._is_exact = is_exact
        self.device = platform.device
        self._dtype = platform.torch_dtype(dtype)
        packed_attention.register()
        self._model = self._load(folder)
        if info.answer_tokens:
            _keep_answers(self._model, info.answer_tokens, folder)
        self._base = self._model if info.task == "embed" else getattr(self._model, self._model.base_model_prefix)
        self._config = self._model.config
        self._takes_types = "token_type_ids" in inspect.signature(self._base.forward).parameters
        self._first_position = _first_position(self._base)
        self._between: Callable[[], None] | None = None
        self._head = EmbeddingHead(folder, info, self.device) if info.task == "embed" else None
        self._head_mode: PoolingMode = _head_mode(self._base)
        self.vocab_size: int = self._config.vocab_size
        longest = longest_context(self._config)
        self.max_tokens = min(filter(None, (longest, info.max_tokens)), default=512)
        """Longest text in tokens."""
        self._pack_linears(platform.make_module_linear)
        self.is_packed = self._can_pack()
        """Whether texts of different length run together."""
        for layer in _layers(self._base, self._config):
            layer.register_forward_pre_hook(self._pause)

    def _load(self, folder: pathlib.Path) -> Any:
        weight_files(folder)  # raises for an index that names files elsewhere, which transformers reads
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it would print a table of the heads that are not needed
        kind: Any = transformers.AutoModel
        if self.info.answer_tokens:
            kind = transformers.AutoModelForCausalLM
        elif self.info.task == "classify":
            kind = transformers.AutoModelForSequenceClassification
        try:
            config = read_config(folder, "")
            model, report = kind.from_pretrained(
                folder,
                config=config,
                trust_remote_code=False,
                use_safetensors=True,  # a pickle runs what its author likes
                dtype=self._dtype,
                output_loading_info=True,
            )
        except (LookupError, AttributeError, TypeError, ValueError, OSError, ImportError) as error:
            raise ModelError(f"{folder} does not load in transformers: {first_sentence(error)}") from error
        missing = sorted(str(name) for name in report["missing_keys"])
        if self.info.task == "embed":
            missing = [name for name in missing if not name.startswith(_UNUSED_HEADS)]
        if missing or report["mismatched_keys"]:
            names = missing or sorted(map(str, report["mismatched_keys"]))
            raise ModelError(f"{folder}: missing or mismatched tensors {names[:5]}")
        return model.eval().to(self.device)

    # ---- running -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, texts: Sequence[PooledText], between: Callable[[], None] | None = None) -> torch.Tensor:
        """Returns float32 [num_texts, dimension] on the host. `between` is called between two layers, and may call this
        method again.
        """
        outer, self._between = self._between, between
        try:
            steps = [[text] for text in texts] if self._is_exact else [texts]
            run = self._run_packed if self.is_packed else self._run_by_length
            rows = torch.cat([run(step) for step in steps])
        finally:
            self._between = outer
        return ACTIVATIONS[self.info.activation](rows).cpu()

    def _pause(self, *_: Any) -> None:
        if self._between is not None:
            self._between()

    def _run_packed(self, texts: Sequence[PooledText]) -> torch.Tensor:
        hidden = self._packed_hidden(texts).split([len(text.token_ids) for text in texts])
        if self._head is not None:
            return torch.stack([self._head(own, text.num_skipped) for own, text in zip(hidden, texts, strict=True)])
        return self._classified(torch.stack([pool(own, self._head_mode) for own in hidden]))

    def _packed_hidden(self, texts: Sequence[PooledText]) -> torch.Tensor:
        """Returns the last hidden states [num_tokens, hidden] of all texts, end to end."""
        lens = [len(text.token_ids) for text in texts]
        positions = torch.cat([torch.arange(length) for length in lens]) + self._first_position
        inputs = self._inputs([[token for text in texts for token in text.token_ids]])
        if self._takes_types:
            inputs["token_type_ids"] = torch.cat([_types(text) for text in texts])[None].to(self.device)
        with packed_attention.packed(list(itertools.accumulate(lens))), self._attention(packed_attention.NAME):
            output = self._base(**inputs, position_ids=positions[None].to(self.device), **self._no_cache)
        return output.last_hidden_state[0]

    def _classified(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of the labels [num_texts, num_labels] of pooled rows [num_texts, hidden], by the model's
        own head, which takes each row for a text of one token.
        """
        base, prefix = self._base, self._model.base_model_prefix
        setattr(self._model, prefix, _Given(base, rows[:, None]))
        try:
            ids = torch.zeros((rows.shape[0], 1), dtype=torch.int64, device=self.device)
            mask = torch.ones_like(ids)
            return self._numbers(self._model(input_ids=ids, attention_mask=mask, **self._no_cache).logits)
        finally:
            setattr(self._model, prefix, base)

    def _numbers(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of the labels [num_texts, num_labels], before the activation, of what the model's head
        gives. That of a model that scores by answers gives the answers' logits [num_texts, num_tokens, num_answers].
        """
        if not self.info.answer_tokens:
            return logits.float()
        fit, *misfit = logits[:, -1].float().split(1, dim=1)
        return fit - misfit[0] if misfit else fit

    def _run_by_length(self, texts: Sequence[PooledText]) -> torch.Tensor:
        rows: list[torch.Tensor | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].token_ids))
        for _, group in itertools.groupby(order, key=lambda index: len(texts[index].token_ids)):
            indices = list(group)
            # without a padding token, transformers' classifiers of decoders take one text at a time
            pads = self._config.pad_token_id is not None
            size = len(indices) if self._head or self.info.answer_tokens or pads else 1
            for start in range(0, len(indices), size):
                batch = indices[start : start + size]
                for index, row in zip(batch, self._run_equal([texts[index] for index in batch]), strict=True):
                    rows[index] = row
        return torch.stack([row for row in rows if row is not None])

    def _run_equal(self, texts: Sequence[PooledText]) -> list[torch.Tensor]:
        """Returns the rows of texts of one length, which the model runs as it was published."""
        inputs = self._inputs([list(text.token_ids) for text in texts])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if self._takes_types:
            inputs["token_type_ids"] = torch.stack([_types(text) for text in texts]).to(self.device)
        output = self._model(**inputs, **self._no_cache)
        if self._head is None:
            return list(self._numbers(output.logits))
        return [self._head(own, text.num_skipped) for own, text in zip(output.last_hidden_state, texts, strict=True)]

    def _inputs(self, token_ids: list[list[int]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(token_ids, dtype=torch.int64, device=self.device)}

    @property
    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if hasattr(self._config, "use_cache") else {}

    @contextlib.contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        """Has the model attend by another function inside the `with`."""
        own = self._config._attn_implementation
        self._config._attn_implementation = name
        try:
            yield
        finally:
            self._config._attn_implementation = own

    # ---- the probe -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _can_pack(self) -> bool:
        """Returns whether two texts in one row get what each of them gets alone, with the model's own attention."""
        probe = [PooledText(tokens, len(tokens)) for tokens in self._probe()]
        expected = self._one_by_one(probe)
        try:
            actual = self._run_packed(probe)
        except packed_attention.CannotPack:
            return False
        except Exception as error:  # the code of each model raises what it likes
            logger.info("%s does not run packed: %s", type(self._model).__name__, first_sentence(error))
            return False
        return self._is_near(actual, expected)

    @torch.inference_mode()
    def _pack_linears(self, make: MakeLinear) -> None:
        """Packs the weights of linears where the model computes the same with them."""
        probe = [PooledText(tokens, len(tokens)) for tokens in self._probe()]
        expected = self._one_by_one(probe)
        pack_linears(self._model, make, lambda: self._is_near(self._one_by_one(probe), expected))

    def _one_by_one(self, texts: Sequence[PooledText]) -> torch.Tensor:
        return torch.stack([self._run_equal([text])[0] for text in texts])

    def _is_near(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        error_ratio = ((actual - expected).norm() / expected.norm().clamp_min(1e-6)).item()
        return actual.shape == expected.shape and error_ratio < _PROBE_TOLERANCE[self._dtype]

    def _probe(self) -> list[list[int]]:
        window = getattr(self._config, "sliding_window", None) or 0
        longest = max(_PROBE_LENS[0], 2 * window + 8 if 2 * window + 8 <= _LONGEST_PROBE else 0)
        lens = [min(length, self.max_tokens) for length in (longest, _PROBE_LENS[1])]
        low, high = min(10, self.vocab_size - 1), self.vocab_size
        return [[low + (7 * place + shift) % max(1, high - low) for place in range(n)] for shift, n in enumerate(lens)]


class _Given(nn.Module):
    """Stands for a model whose hidden states are known, so that only its head computes."""

    def __init__(self, base: Any, hidden: torch.Tensor) -> None:
        super().__init__()
        pooler = getattr(base, "pooler", None)
        pooled = None if pooler is None else pooler(hidden)
        self._output = transformers.modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled
        )

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


def _keep_answers(model: Any, answers: Sequence[int], folder: pathlib.Path) -> None:
    """Has a model compute the logits of `answers` alone, in their order. Raises `ModelError` if it cannot."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{folder}: {type(model).__name__} has no linear for logits, and cannot score by answers")
    if max(answers) >= head.out_features:
        raise ModelError(f"{folder}: the answer {max(answers)} is not among the {head.out_features} tokens")
    rows = torch.tensor(answers, device=head.weight.device)
    kept = nn.Linear(head.in_features, len(answers), head.bias is not None, head.weight.device, head.weight.dtype)
    with torch.no_grad():
        kept.weight.copy_(head.weight[rows])
        if head.bias is not None:
            kept.bias.copy_(head.bias[rows])
    model.set_output_embeddings(kept)


def _types(text: PooledText) -> torch.Tensor:
    """Returns 0 for the tokens of the first text of a pair, 1 for those of the second."""
    types = torch.zeros(len(text.token_ids), dtype=torch.int64)
    types[text.num_first :] = 1
    return types


def _first_position(base: Any) -> int:
    """Returns the position of a text's first token: models after fairseq begin behind the padding token's id."""
    own = first_position(base.config)
    for module in base.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding + 1
    return own


def _head_mode(base: Any) -> PoolingMode:
    """Returns which row of a text the classifying head of transformers' model takes."""
    named = getattr(base.config, "classifier_pooling", None)
    if named is not None:
        return "mean" if named == "mean" else "cls"
    is_causal = any(getattr(module, "is_causal", False) for module in base.modules())
    return "lasttoken" if is_causal else "cls"


def _layers(base: Any, config: Any) -> list[Any]:
    """Returns the modules of the layers in order; empty if the model keeps them in no list of its own."""
    count = getattr(config, "num_hidden_layers", 0)
    lists = (module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return list(next(lists, ()))
