"""A worker of another framework: a small Llama in numpy behind `workers/ranks/rank_worker.py`, to prove that seam.

It has nothing of `Platform`, of torch's kernels or of `ModelRunner`. What it keeps of sequences, how it verifies drafts
and how it plans its memory is what every worker shares; its logits are drawn by the samplers for the host.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.numpy import load_file

from manta.structured.logits_processors import LogitsProcessorFactory, LogitsProcessorRegistry
from manta.structured.masks import MaskBatch
from manta.workers.checkpoints.memory import plan_kv_cache, plan_max_model_len, weight_bytes, weight_files
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.decoders.rope_table import rope_table
from manta.workers.kernels import torch_sampler
from manta.workers.model_info import ModelInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.weight_specs import LinearSpec, NormSpec
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.ranks.rank_worker import ALONE, RankPlace, StepTimes
from manta.workers.sampling.row_status import OK
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.sampling.verification import drafts_as_tokens, drafts_of, keep_verified
from manta.workers.step import StepInput, StepOutput
from manta.workers.torch_worker.sampler import prompt_logprobs, sample

FREE_BYTES = 1 << 30


class NumpyLlama:
    """What the families of `workers/models/` describe, in float32, one sequence after the other."""

    def __init__(self, folder: pathlib.Path, config: ModelConfig) -> None:
        self.config = config
        self._spec = describe(config)
        self._weights = {
            name: array.astype(np.float32) for path in weight_files(folder) for name, array in load_file(path).items()
        }
        self._cos_sin = rope_table(config.rope, config.head_dim, config.max_position_embeddings)

    def allocate_kv(self, num_blocks: int, block_size: int) -> np.ndarray:
        """Returns a KV cache, float32 [num_layers, 2 (k, v), num_blocks, block_size, num_kv_heads, head_dim]."""
        config = self.config
        return np.zeros(
            (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim), dtype=np.float32
        )

    def forward(
        self,
        token_ids: np.ndarray,
        starts: Sequence[int],
        counts: Sequence[int],
        block_tables: np.ndarray,
        kv_cache: np.ndarray,
    ) -> np.ndarray:
        """Returns the hidden states after the last norm, [num_tokens, hidden], of a flat batch: `counts[i]` tokens of
        sequence `i` from position `starts[i]` on. Writes their keys and values.
        """
        ends = np.cumsum(counts)
        parts = [
            self._forward_one(token_ids[end - count : end], start, table, kv_cache)
            for start, count, end, table in zip(starts, counts, ends, block_tables, strict=True)
        ]
        return np.concatenate(parts)

    def _forward_one(self, token_ids: np.ndarray, start: int, table: np.ndarray, kv_cache: np.ndarray) -> np.ndarray:
        config, end = self.config, start + len(token_ids)
        positions = np.arange(start, end)
        block_size = kv_cache.shape[3]
        slots = table[np.arange(end) // block_size], np.arange(end) % block_size
        hidden = self._weights[f"{self._spec.embedding.name}.weight"][token_ids]
        for index, layer in enumerate(self._spec.layers):
            attention, mlp = layer.mixer, layer.mlp
            normed = self._norm(hidden, layer.input_norm)
            query, key, value = (
                self._linear(normed, attention.qkv, part).reshape(len(token_ids), -1, config.head_dim)
                for part in range(3)
            )
            if attention.q_norm is not None and attention.k_norm is not None:
                query, key = self._norm(query, attention.q_norm), self._norm(key, attention.k_norm)
            keys, values = kv_cache[index]
            keys[slots[0][start:], slots[1][start:]] = self._rotated(key, positions)
            values[slots[0][start:], slots[1][start:]] = value
            attended = self._attention(
                self._rotated(query, positions), keys[slots], values[slots], positions, config.sliding_windows[index]
            )
            hidden = hidden + self._linear(attended, attention.output)
            normed = self._norm(hidden, layer.mlp_norm)
            gate, up = (self._linear(normed, mlp.gated, part) for part in range(2))
            hidden = hidden + self._linear(gate / (1 + np.exp(-gate)) * up, mlp.down)
        return self._norm(hidden, self._spec.final_norm)

    def compute_logits(self, hidden: np.ndarray) -> np.ndarray:
        """Returns the logits, [num_rows, vocab_size]."""
        return self._linear(hidden, self._spec.head)

    def _linear(self, x: np.ndarray, linear: LinearSpec, part: int = 0) -> np.ndarray:
        name = linear.parts[part].name
        product = x @ self._weights[f"{name}.weight"].T
        return product + self._weights[f"{name}.bias"] if linear.has_bias else product

    def _norm(self, x: np.ndarray, norm: NormSpec) -> np.ndarray:
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self._weights[f"{norm.name}.weight"]

    def _rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`x` [n, heads, head_dim] at its positions [n]."""
        half = self.config.head_dim // 2
        cos, sin = self._cos_sin[positions, None, :half], self._cos_sin[positions, None, half:]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attention(
        self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, window: int | None
    ) -> np.ndarray:
        """Causal attention: query [n, heads, head_dim], keys and values [context, kv_heads, head_dim]."""
        num_queries, num_heads, head_dim = query.shape
        # By KV head: [kv_heads, group, n, head_dim] against [kv_heads, 1, head_dim, context]
        query = query.reshape(num_queries, keys.shape[1], -1, head_dim).transpose(1, 2, 0, 3)
        scores = query @ keys.transpose(1, 2, 0)[:, None] * self.config.heads.scale
        distance = positions[:, None] - np.arange(len(keys))
        is_hidden = (distance < 0) | (distance >= window) if window is not None else distance < 0
        scores = np.where(is_hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = weights @ values.transpose(1, 0, 2)[:, None]
        return attended.transpose(2, 0, 1, 3).reshape(num_queries, num_heads * head_dim)


class NumpyRunner:
    """Executes steps, and holds the model and its KV cache under the names that tests of torch's runner use."""

    def __init__(self, model: NumpyLlama, sequences: RankSequences, num_blocks: int) -> None:
        self.model = model
        self.sequences = sequences
        self.kv_cache = model.allocate_kv(num_blocks, sequences.block_size)
        self._step: StepInput | None = None
        self._hidden: np.ndarray | None = None

    def reset(self) -> None:
        self.sequences.clear()
        self._step = self._hidden = None

    def execute(self, step: StepInput) -> None:
        sequences = self.sequences
        sequences.begin(step)
        if step.block_copies:
            sources, destinations = np.array(step.block_copies).T
            self.kv_cache[:, :, destinations] = self.kv_cache[:, :, sources]
        self._step, self._hidden = step, None
        if step.scheduled:
            tables = sequences.block_tables([item.sequence_id for item in step.scheduled])
            starts, counts = zip(*((item.start, item.num_tokens) for item in step.scheduled), strict=True)
            self._hidden = self.model.forward(sequences.token_ids(step), starts, counts, tables, self.kv_cache)

    def sample(self, masks: MaskBatch | None) -> StepOutput:
        step, hidden, state = self._step, self._hidden, self.sequences.sampling
        assert step is not None
        output = StepOutput(step.step_id, errors=self.sequences.start_errors(step))
        self._step = None
        if hidden is None:
            return output
        self._prompt_logprobs(step, hidden, output)
        points, drafts = step.sample_points, drafts_of(step)
        if points:
            with drafts_as_tokens(drafts, state):
                logits = torch.from_numpy(self.model.compute_logits(hidden[[point.row for point in points]]))
                drawn = sample(torch_sampler, logits, points, state, masks).to_host()
            keep_verified(points, drafts, drawn, state, output)
        return output

    def _prompt_logprobs(self, step: StepInput, hidden: np.ndarray, output: StepOutput) -> None:
        for asked in self.sequences.prompt_targets(step):
            rows = hidden[asked.first_row : asked.first_row + len(asked.next_token_ids)]
            logits = torch.from_numpy(self.model.compute_logits(rows))
            output.prompt_logprobs[asked.sequence_id] = prompt_logprobs(
                torch_sampler, logits, asked.next_token_ids.tolist(), asked.num_top, self.sequences.sampling.vocab_size
            )


class NumpyDraftRunner:
    """A `DraftRunner`."""

    def __init__(self, model: NumpyLlama, target: NumpyRunner) -> None:
        self.model = model
        self._sequences = target.sequences
        self._kv_cache = model.allocate_kv(target.kv_cache.shape[2], target.sequences.block_size)

    @property
    def max_model_len(self) -> int:
        return self.model.config.max_position_embeddings

    def compute(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        token_ids: np.ndarray,
        block_tables: np.ndarray,
        drawing: Mapping[int, SequenceState],
    ) -> list[int | None]:
        hidden = self.model.forward(token_ids, starts, counts, block_tables, self._kv_cache)
        if not drawing:
            return []
        rows = (np.cumsum(counts) - 1)[list(drawing)]
        logits = torch.from_numpy(self.model.compute_logits(hidden[rows]))
        sequences = list(drawing.values())
        positions = [each.num_tokens for each in sequences]
        drawn, status = torch_sampler.draw(logits, sequences, positions, self._sequences.sampling)
        return [token if code == OK else None for token, code in zip(drawn.tolist(), status.tolist(), strict=True)]

    def measure(self) -> StepTimes:
        return measured(self.model, self._kv_cache)


class NumpyWorker:
    """A `SpeculationTarget` in numpy, of one rank; see `TorchWorker` for the arguments."""

    runs_ahead = False
    keeper = None
    adapters = None

    def __init__(
        self,
        options: ModelOptions,
        place: RankPlace = ALONE,
        max_draft_tokens: int = 0,
        draft_folder: pathlib.Path | None = None,
        loads_draft_head: bool = False,
    ) -> None:
        assert options.tensor_parallel_size == 1
        assert not loads_draft_head
        assert place == ALONE
        folder = resolve_model_folder(options.model)
        config = load_model_config(folder)
        draft_config = None if draft_folder is None else load_model_config(draft_folder)
        sizes = plan_kv_cache(
            config,
            "float32",
            options,
            free_bytes=FREE_BYTES,
            weight_bytes=weight_bytes(folder, "float32"),
            draft=draft_config,
        )
        num_blocks = sizes.num_blocks
        max_model_len = plan_max_model_len(config, options.max_model_len, num_blocks * options.block_size)
        self.processors = LogitsProcessorRegistry(options.logits_processors)
        self.sequences = RankSequences(
            config.vocab_size, options.block_size, options.max_num_sequences, max_model_len, self.processors
        )
        self.runner = NumpyRunner(NumpyLlama(folder, config), self.sequences, num_blocks)
        self.draft: NumpyDraftRunner | None = None
        if draft_folder is not None and draft_config is not None:
            self.draft = NumpyDraftRunner(NumpyLlama(draft_folder, draft_config), self.runner)
        self.info = ModelInfo(
            folder=str(folder),
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=config.eos_token_ids,
            num_blocks=num_blocks,
            block_size=options.block_size,
            kv_cache_bytes=sizes.num_bytes,
            kv_cache_dtype="float32",
            dtype="float32",
            platform="cpu",
            kernels="numpy",
            load_seconds=0.0,
        )

    def execute(self, step: StepInput) -> None:
        with np.errstate(invalid="ignore"):  # of a block that a test poisons
            self.runner.execute(step)

    def is_computing(self) -> bool:
        return False

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self.runner.sample(masks)

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        raise AssertionError("it is the only rank")

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self.processors.register(name, factory)

    def reset(self) -> None:
        self.runner.reset()

    def measure(self) -> StepTimes:
        return measured(self.runner.model, self.runner.kv_cache)


def measured(model: NumpyLlama, kv_cache: np.ndarray) -> StepTimes:
    """Returns the seconds of a step of 1 and of 8 tokens."""
    table = np.zeros((1, 1), dtype=np.int32)
    times = []
    for count in (1, 8):
        started = time.perf_counter()
        hidden = model.forward(np.zeros(count, dtype=np.int64), [0], [count], table, kv_cache)
        model.compute_logits(hidden)
        times.append((count, time.perf_counter() - started))
    return times
