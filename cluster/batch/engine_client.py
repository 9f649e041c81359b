"""The engines as a batch calls them: after everybody else, and with nobody who reads an answer before its end."""

from __future__ import annotations

from typing import Any

from cluster.serve.engine_client import EngineClient
from cluster.serve.submission import Submission
from workers.sampling_params import SamplingParams

PRIORITY = 1000
"""Added to that of each line: below what interactive requests ask for."""


class BatchEngineClient(EngineClient):
    reads_whole = True

    def submit(
        self, request_id: str, prompts: list[list[int]], params: SamplingParams, *, priority: int, **options: Any
    ) -> Submission:
        return super().submit(request_id, prompts, params, priority=priority + PRIORITY, **options)
