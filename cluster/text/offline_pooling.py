"""Vectors and scores without a server: what `LLM` does with a model that pools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from manta.cluster.config import EngineConfig
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.errors import error_of, refuse
from manta.cluster.text.pooled_texts import TextForm, check_vectors, instruction_of, prompt_of, shaped, tokenise
from manta.cluster.text.tokenizer import TextOrPair, Tokenizer
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.pooling_info import PoolingInfo, PoolingTask


class OfflinePooler:
    """A model that pools, in this process. Not thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        from manta.cluster.engine.pooling_engine import PoolingEngine  # it imports transformers

        self.engine = PoolingEngine(config)
        self.tokenizer = Tokenizer(config.tokenizer or self.engine.model.folder)
        self._ids = itertools.count()

    def _info(self, task: PoolingTask) -> PoolingInfo:
        info = self.engine.model.pooling
        assert info is not None
        if info.task != task:
            refuse("unsupported", "model", cause=f"its task is {info.task}, not {task}", remedy="load another model")
        return info

    def embed(
        self, texts: Sequence[str | Sequence[int]], prompt_name: str | None, dimensions: int | None, truncate: bool
    ) -> np.ndarray:
        info = self._info("embed")
        check_vectors(info, dimensions, None)
        given = [text if isinstance(text, str) else list(text) for text in texts]
        return shaped(self._rows(given, prompt_of(info, prompt_name), truncate), dimensions, None)

    def classify(self, texts: Sequence[str], truncate: bool) -> np.ndarray:
        return self._rows(list(texts), prompt_of(self._info("classify"), None), truncate)

    def score(
        self, queries: Sequence[str], texts: Sequence[str], truncate: bool, instruction: str | None
    ) -> np.ndarray:
        info = self._info("classify")
        if not info.scores_pairs:
            refuse(
                "unsupported", "model", cause="it has several labels, and no score of a pair", remedy="call classify"
            )
        pairs = list(zip(queries, texts, strict=True))
        field = "model" if instruction is None else "instruction"
        return self._rows(pairs, instruction_of(info, instruction), truncate, field)[:, 0]

    def _rows(
        self, texts: Sequence[TextOrPair | list[int]], prompt: str, truncate: bool, prompt_field: str = "model"
    ) -> np.ndarray:
        model = self.engine.model
        form = TextForm(
            model=model,
            field_of=lambda index: f"texts[{index}]",
            prompt=prompt,
            prompt_field=prompt_field,
            most_tokens=model.max_model_len if truncate else None,
        )
        inputs = tokenise(self.tokenizer, texts, form)
        return self._run(inputs) if inputs else np.zeros((0, self._dimension), dtype=np.float32)

    @property
    def _dimension(self) -> int:
        info = self.engine.model.pooling
        return 0 if info is None else info.dimension

    def _run(self, inputs: list[PooledInput]) -> np.ndarray:
        results: list[PoolingResult] = []
        request = PoolingRequest(request_id=f"pool-{next(self._ids)}", texts=inputs)
        job = self.engine.add(request, lambda _, result: results.append(result))
        try:
            while not results:
                self.engine.step()
        finally:
            self.engine.abort(job)
        (result,) = results
        if result.refusal is not None:
            raise error_of(result.refusal)
        return result.rows()


def make_pooler(config: EngineConfig) -> OfflinePooler | None:
    """Returns what answers with vectors or scores; None if the model generates text."""
    pools = read_pooling(resolve_model_folder(config.model), config.task) is not None
    return OfflinePooler(config) if pools else None
