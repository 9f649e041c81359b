"""Architectures without a native form: transformers' own model code over Manta's paged attention and KV cache.

Registers an attention function with transformers that writes keys and values to the paged cache and attends over it.
Every model whose attention can be replaced then runs in Manta's flat batches; `workers/decoders/own_attention.py`
replaces that of families with code of their own. The attentions of a token are numbered in the order in which the model
computes them, and each has a cache of its own: mostly one for each layer, but some families' layers attend twice or run
several times. A model that cannot run so is refused, with its name and the reason: by its configuration
(`workers/checkpoints/transformers_support.py`), or here by a probe at load. Imported only if such a model is asked for.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.memory import weight_files
from manta.workers.checkpoints.transformers_support import (
    OWN_ATTENTION,
    first_position,
    layers_key,
    num_attention_calls,
    register_model,
    text_config,
    uses_alibi,
)
from manta.workers.decoders.key_bias import Alibi, with_key_bias
from manta.workers.decoders.layer_windows import SHRUNK, Windows, check_cache, observe_windows, shrunk_lengths
from manta.workers.decoders.own_attention import alibi_bias, is_linear, replace_attention
from manta.workers.decoders.own_positions import further_inputs, give_positions
from manta.workers.decoders.text_part import base_name, text_part
from manta.workers.kept_weights import KEPT_BITS, KeptBits
from manta.workers.kernels import kv_cache
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.layer_caches import layer_caches
from manta.workers.kernels.protocol import Forward, KVCaches
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.weights import LinearWeight
from manta.workers.kv_groups import group_layers, one_group
from manta.workers.load_meter import LOAD_METER
from manta.workers.models.model_config import HeadShape, ModelConfig, ModelError
from manta.workers.platforms import Platform

logger = logger_of(__name__)

_COMPUTED_BUFFERS = (".inv_freq", ".attn.bias", ".attention.bias", ".masked_bias", ".position_ids")
"""Ends of the names of buffers that older checkpoints store and that transformers computes."""
_ATTENTION_NAME = "manta_paged"
_SET_TO_GENERATE = {"big_bird": {"attention_type": "original_full"}}
"""Values of options that transformers changes itself before it generates, by `model_type`."""
_REFUSED_ARGUMENTS = {"position_bias": "attention biases by position"}
_PROBE_LENS = (SHRUNK * SHRUNK + 8, 11)
"""Tokens of the two sequences of a probe. The first is longer than everything that is shrunk for it."""
_PROBE_IDS = 97
"""A probe has token ids from 1 to this one, which any vocabulary has."""
_LEAST_LOGIT = -1e4
"""Logits below this one are those of tokens that a model never gives, such as the pictures of Chameleon."""
_READ_OF_BASE = ("vocabulary_mapping",)
"""Attributes of its base that a model's own code reads while it computes logits."""
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest norm of the difference, divided by the norm of the logits; with a wrong attention it is about 1."""


class _Output(BaseModelOutputWithPast):
    """Gives None for fields that it lacks: models copy further fields of their transformer's output (router logits,
    cross attentions) into their own.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _FinalHidden(nn.Module):
    """Takes the place of the model's transformer, and returns hidden states that were computed before.

    The model's own code then turns them into logits, with all scaling or capping that it applies around its head.
    """

    hidden: torch.Tensor

    @property
    def decoder(self) -> _FinalHidden:
        """The part that models of OPT's kind call instead of the whole."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden)


class TransformersModel:
    """One model of transformers, with the interface of `workers/kernels/model_protocol.py`. Not thread-safe.

    Raises `ModelError` if the model turns out not to run over the paged cache.
    """

    compiled: Forward | None = None

    def __init__(
        self,
        folder: str | pathlib.Path,
        config: ModelConfig,
        dtype: torch.dtype,
        platform: Platform,
        kept: KeptBits = KEPT_BITS["auto"],
    ) -> None:
        self.config = config
        self._platform = platform
        self._metadata: AttentionMetadata | None = None
        self._kv_caches: KVCaches = []
        self._num_attended = 0
        self._windows: Windows = []
        """The sliding window of each attention; empty for families with attention code of their own."""
        self._positions = torch.empty(0, dtype=torch.int64)
        """The positions of the tokens of a step."""
        self._places = one_group(config.attends).layers
        causal_model, self._transformer = self._load(folder, dtype, platform, kept)
        self._own = own = text_config(causal_model.config)
        self._has_own_attention = own.model_type in OWN_ATTENTION
        self._first_position = first_position(own)
        self._alibi = None
        if uses_alibi(own):
            bias = alibi_bias(causal_model, config.max_position_embeddings)
            self._alibi = Alibi(bias, config.head_dim, platform.device)
        windows = self._observe(causal_model, checks_cache=True)
        # Own attention keeps its windows in tensors, so a probe of it is as long as they are.
        with contextlib.nullcontext() if self._has_own_attention else shrunk_lengths(causal_model):
            self._windows = self._observe(causal_model)
            probe = _probe_tokens(config, own)
            expected = self._own_logits(causal_model, probe)
            self._final_hidden = _FinalHidden()
            for name in (each for each in _READ_OF_BASE if hasattr(self._transformer, each)):
                setattr(self._final_hidden, name, getattr(self._transformer, name))
            setattr(causal_model, base_name(causal_model), self._final_hidden)
            self._head = causal_model
            self._check(probe, expected, dtype)
        self._windows = windows
        self.sliding_windows = tuple(windows) or (None,) * config.num_layers
        """The window of each attention in positions, the token's own included; None for all."""
        self._places = group_layers(self.sliding_windows).layers

    def _load(
        self, folder: str | pathlib.Path, dtype: torch.dtype, platform: Platform, kept: KeptBits
    ) -> tuple[Any, Any]:
        """Returns what computes logits, and its part that computes final hidden states."""
        transformers.AttentionInterface.register(_ATTENTION_NAME, _attend)
        transformers.utils.logging.disable_progress_bar()
        weight_files(pathlib.Path(folder))  # raises for an index that names files elsewhere, which transformers reads
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        register_model(config)
        text = text_config(config)
        num_stored = num_attention_calls(text)
        _keep_first_layers(text, self.config.num_layers)
        for name, value in _SET_TO_GENERATE.get(text.model_type, {}).items():
            setattr(text, name, value)
        models = transformers.AutoModelForCausalLM if text is config else transformers.AutoModelForImageTextToText
        try:
            loaded: Any = models.from_pretrained(
                folder,
                config=config,
                trust_remote_code=False,
                use_safetensors=True,  # a pickle runs what its author likes
                dtype=dtype,
                attn_implementation=_implementation(text),
                output_loading_info=True,
            )
        except (
            LookupError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # model code that takes no other attention
            raise ModelError(f"{self.config.architecture} does not load over a paged cache: {error!r}") from error
        model, report = loaded
        for kind in ("missing_keys", "mismatched_keys"):
            if report[kind]:
                raise ModelError(f"{folder}: {kind.replace('_keys', '')} tensors {sorted(map(str, report[kind]))[:5]}")
        self.unused_tensors = self._unused_tensors(model, sorted(map(str, report["unexpected_keys"])), num_stored)
        model, transformer = text_part(model.eval())
        head = model.get_output_embeddings()
        linears = [module for part in (transformer, head) for module in part.modules() if is_linear(module)]
        LOAD_METER.expect(sum(module.weight.nbytes for module in linears))
        for part in (transformer, head):
            part.to(platform.device)
            for name, module in part.named_modules():
                if hasattr(module, "layer_idx"):
                    module.manta_model = self
                if is_linear(module):
                    _pack(name, module, dtype, platform, kept.head if module is head else kept.layers)
        return model, transformer

    def _unused_tensors(self, model: Any, unexpected: list[str], num_stored: int) -> list[str]:
        """Returns the stored tensors that no module takes, but for those of the checkpoint's `num_stored` layers that
        are left out.

        Raises `ModelError` if one is a weight of a module that the model has, which would compute without it.
        """
        modules = dict(model.named_modules())
        left_out = range(self.config.num_layers, num_stored)
        names = [each for each in unexpected if not each.endswith(_COMPUTED_BUFFERS) and _layer(each) not in left_out]
        for name in names:
            owner, _, weight = name.rpartition(".")
            if owner in modules and next(modules[owner].parameters(recurse=False), None) is not None:
                raise ModelError(
                    f"{self.config.architecture} is not supported: the checkpoint has a {weight} of {owner}, which "
                    "transformers would leave out"
                )
        if names:
            logger.warning(
                "%s has no part for %d tensors of its files: %s", type(model).__name__, len(names), names[:5]
            )
        return names

    @torch.inference_mode()
    def _observe(self, model: Any, checks_cache: bool = False) -> Windows:
        """Returns the windows of the model's attentions at this moment."""
        if self._has_own_attention:
            return []
        num_positions = self.config.max_position_embeddings
        try:
            windows = observe_windows(model, num_positions)
            if checks_cache:
                check_cache(model.config, windows, num_positions)
            return windows
        except ModelError as error:
            raise ModelError(f"{self.config.architecture} is not supported: {error}") from error
        except Exception as error:  # model code may raise anything, and that is why the model cannot run
            raise ModelError(f"{self.config.architecture} does not run over a paged cache: {error!r}") from error

    @torch.inference_mode()
    def _own_logits(self, model: Any, probe: list[list[int]]) -> list[torch.Tensor]:
        """Logits of each sequence of a probe, run alone and with the model's own attention. Afterwards the model
        attends over the paged cache.
        """
        if not self._has_own_attention:
            model.set_attn_implementation("eager")
        probes = [self._platform.place(np.array([tokens])) for tokens in probe]
        outputs = [model(input_ids=each, use_cache=False, **further_inputs(self._own, each)) for each in probes]
        if self._has_own_attention:
            replace_attention(model, self.attend)
        else:
            model.set_attn_implementation(_ATTENTION_NAME)
        give_positions(model, lambda: self._positions)
        return [output.logits[0] for output in outputs]

    def _check(self, probe: list[list[int]], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
        """Compares the logits of a prefill and a decode step of two sequences with those that the model computes with
        its own attention.
        """
        architecture = self.config.architecture
        try:
            actual = self._probe(probe, dtype)
        except ModelError:
            raise
        except Exception as error:  # model code may raise anything, and that is why the model cannot run
            raise ModelError(f"{architecture} does not run over a paged cache: {error!r}") from error
        if self._num_attended != self.config.num_layers:
            raise ModelError(
                f"{architecture} is not supported: a token attends {self._num_attended} times through transformers' "
                f"replaceable attention, and not {self.config.num_layers} times"
            )
        for own, paged in zip(expected, actual, strict=True):
            own, paged = own.float().clamp(min=_LEAST_LOGIT), paged.float().clamp(min=_LEAST_LOGIT)
            if own.shape != paged.shape or own.shape[1] != self.config.vocab_size:
                raise ModelError(f"{architecture} gives logits {list(own.shape)}, and paged {list(paged.shape)}")
            error_ratio = ((own - paged).norm() / (own - own.mean()).norm()).item()
            if not error_ratio < _PROBE_TOLERANCE[dtype]:
                raise ModelError(
                    f"{architecture} is not supported: over the paged cache its logits are off by {error_ratio:.1%}, "
                    "so it does more than causal attention"
                )

    def _probe(self, probe: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Logits [num_tokens, vocab_size] of each sequence, all tokens but the last prefilled, the last decoded."""
        platform, block_size = self._platform, 16
        num_blocks = -(-max(map(len, probe)) // block_size)
        kv = platform.allocate_kv(self.config, len(probe) * num_blocks, block_size, dtype)
        kv_caches = layer_caches(kv, one_group(self.config.attends))
        prompt_lens = np.array([len(tokens) - 1 for tokens in probe])
        block_tables = np.arange(len(probe) * num_blocks, dtype=np.int32).reshape(len(probe), num_blocks)
        prompts = platform.place(np.array([token for tokens in probe for token in tokens[:-1]]))
        lasts = platform.place(np.array([tokens[-1] for tokens in probe]))
        metadata = platform.build_metadata(
            QueryTokens(np.zeros_like(prompt_lens), prompt_lens, block_tables, block_size)
        )
        prefilled = self.compute_logits(self.forward(prompts, metadata, kv_caches)).split(prompt_lens.tolist())
        metadata = platform.build_metadata(
            QueryTokens(prompt_lens, np.ones_like(prompt_lens), block_tables, block_size)
        )
        decoded = self.compute_logits(self.forward(lasts, metadata, kv_caches)).split(1)
        return [torch.cat(rows) for rows in zip(prefilled, decoded, strict=True)]

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Final hidden states [num_tokens, hidden] of int64 token_ids [num_tokens]; fills the layers' KV caches."""
        self._metadata, self._kv_caches, self._num_attended = metadata, kv_caches, 0
        self._positions = metadata.positions + self._first_position
        batch = token_ids.unsqueeze(0)
        output = self._transformer(
            input_ids=batch,
            position_ids=self._positions.unsqueeze(0),
            use_cache=False,
            **further_inputs(self._own, batch),
        )
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of final hidden states [num_rows, hidden]."""
        self._final_hidden.hidden = hidden.unsqueeze(0)
        no_ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.int64)
        return self._head(input_ids=no_ids, use_cache=False).logits[0]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
        key_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tokens' next attention: query [1, num_heads, num_tokens, head_dim] -> [1, num_tokens, num_heads,
        head_dim]. There may be `sinks` [num_heads], a soft `cap` of its products, and a `key_bias` [num_kv_heads,
        num_tokens]. `sliding_window` is that which the model names; one of its mask wins.
        """
        assert self._metadata is not None
        number, architecture = self._num_attended, self.config.architecture
        if number == self.config.num_layers:
            raise ModelError(f"{architecture} is not supported: a token attends more than {number} times")
        place = self._places[number]
        assert place is not None
        window = self._windows[number] if self._windows else sliding_window
        metadata = self._metadata.of_group(place.group)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        value_dim = value.shape[-1]
        if self._alibi is not None:
            query, key, value = self._alibi.widen(query, key, value, metadata.positions, scale)
        if key_bias is not None:
            query, key, value = with_key_bias(query, key, value, key_bias, scale, self.config.head_dim)
        _, num_heads, num_tokens, head_dim = query.shape
        expected = (1, self.config.num_kv_heads, num_tokens, self.config.head_dim)
        if key.shape != expected or value.shape != expected:
            raise ModelError(
                f"{architecture} is not supported: attention {number} has keys {list(key.shape)} and values "
                f"{list(value.shape)}, and the cache holds {list(expected)}"
            )
        k_cache, v_cache = self._kv_caches[number]
        for cache, new in ((k_cache, key), (v_cache, value)):
            kv_cache.write(cache, metadata.slot_mapping, new[0].transpose(0, 1), metadata.block_size)
        heads = HeadShape(num_heads, self.config.num_kv_heads, head_dim, scale, cap)
        attended = self._platform.kernels.paged_attention(
            query[0].transpose(0, 1).reshape(num_tokens, num_heads * head_dim).contiguous(),
            k_cache,
            v_cache,
            metadata,
            heads,
            window,
            None if sinks is None else sinks.detach().float().contiguous(),
        )
        self._num_attended += 1
        return attended.view(1, num_tokens, num_heads, head_dim)[..., :value_dim]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; each module has its `TransformersModel` in `manta_model`."""
    for name, meaning in _REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ModelError(f"{type(module).__name__} is not supported: {meaning} are not implemented")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} is not supported: it attends otherwise than causally")
    return module.manta_model.attend(query, key, value, scaling, sliding_window, s_aux, softcap or 0.0), None


def _probe_tokens(config: ModelConfig, own: Any) -> list[list[int]]:
    """Token ids of two sequences. The first is longer than every window of the model that is not shrunk."""
    names = ("window_size", "sliding_window") if own.model_type in OWN_ATTENTION else ("window_size",)
    longest = max(_PROBE_LENS[0], *(8 + (getattr(own, name, None) or 0) for name in names))
    most_ids = min(_PROBE_IDS, config.vocab_size - 1)
    lens = [min(length, config.max_position_embeddings) for length in (longest, _PROBE_LENS[1])]
    return [[1 + (5 * position + shift) % most_ids for position in range(length)] for shift, length in enumerate(lens)]


def _keep_first_layers(config: Any, num_layers: int) -> None:
    """Leaves at most the first `num_layers` layers in `config`; its lists with an entry for each layer are cut too."""
    total = num_attention_calls(config)
    if num_layers < total:
        for name, value in config.to_dict().items():
            if isinstance(value, list) and len(value) == total:
                setattr(config, name, value[:num_layers])
        setattr(config, layers_key(config), num_layers)


def _implementation(config: Any) -> str | None:
    """Returns the attention that a model is loaded with. That of transformers which computes by products and masks is
    compared with Manta's. Falcon's adds its ALiBi twice, and None lets transformers choose another one.
    """
    if config.model_type not in OWN_ATTENTION:
        return _ATTENTION_NAME
    return None if config.model_type == "falcon" else "eager"


def _layer(name: str) -> int | None:
    """Returns the number of the layer that a tensor belongs to."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _pack(name: str, module: Any, dtype: torch.dtype, platform: Platform, bits: int | None) -> None:
    """Replaces the weight of an `nn.Linear` by the platform's packed form, and frees it if nothing shares it."""
    weight = LinearWeight(name, module.weight.detach(), module.bias, dtype, rounded_to=bits)
    LOAD_METER.add(module.weight.nbytes)
    module.forward = platform.make_linear(weight).forward
    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
