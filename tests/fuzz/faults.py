"""Faults: each is done to a part of a running engine, where it would happen."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import FinishStatus
from manta.cluster.engine.sequence import Sequence
from manta.structured.grammar_pool.pool import GrammarPool
from tests.engine_parts import device_of, poison_block, worker_of
from tests.fuzz.cases import Fault

MIN_STEPS_BETWEEN = 2
"""Good steps between two that raise: two in a row end an engine, as they should."""


class Injected(RuntimeError):
    """As it was told to."""


class Injector:
    """Does each fault of a case once, in the first step from its own on in which it can be done."""

    def __init__(self, faults: tuple[Fault, ...], engine: Engine, counts: collections.Counter[str]) -> None:
        self.poisoned: set[str] = set()
        """Requests that a NaN in keys and values may make fail."""
        self._engine = engine
        self._counts = counts
        self._pending = sorted(faults, key=lambda fault: fault.step)
        self._raise_at = ""
        self._good_steps = MIN_STEPS_BETWEEN
        self._late_answers: dict[int, int] = {}
        """Grammar session to how often its mask is still denied."""
        self._num_denied = 0
        """Places on grammar workers."""
        self._full_pool: GrammarPool | None = None
        self._watched_pool: GrammarPool | None = None
        self._nan_blocks: dict[int, list[Sequence]] = {}
        """Blocks with a NaN, and who has held them since."""
        self._watch_steps()
        self._watch_readers()

    def before_step(self, step: int) -> None:
        for fault in [fault for fault in self._pending if fault.step <= step]:
            if getattr(self, f"_{fault.kind}")(fault, step):
                self._pending.remove(fault)
                self._counts[f"fault {fault.kind}"] += 1

    # ---- steps that raise ----------------------------------------------------------------------------------------

    def _watch_steps(self) -> None:
        executor = device_of(self._engine)
        model = worker_of(self._engine).runner.model
        execute, forward = executor.execute, model.forward

        def watched_forward(*arguments: Any) -> Any:
            self._raise_if_told("raise_in_forward")
            return forward(*arguments)

        def watched_execute(step: Any) -> None:
            execute(step)
            self._raise_if_told("raise_after_forward")

        def watched(draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def watched_draw(masks: Any = None) -> Any:
                drawn = draw(masks)
                self._raise_if_told("raise_after_sample")
                self._good_steps += 1
                return drawn

            return watched_draw

        model.forward, executor.execute, executor.sample = watched_forward, watched_execute, watched(executor.sample)
        if hasattr(executor, "draw"):  # an executor of a device that works by itself calls this one instead
            executor.draw = watched(executor.draw)

    def _raise_if_told(self, place: str) -> None:
        if self._raise_at == place:
            self._raise_at, self._good_steps = "", 0
            raise Injected(place)

    def _arm(self, fault: Fault, step: int) -> bool:
        if self._raise_at or self._good_steps < MIN_STEPS_BETWEEN or not self._engine.scheduler.running:
            return False
        self._raise_at = fault.kind
        return True

    _raise_in_forward = _raise_after_forward = _raise_after_sample = _arm

    # ---- keys and values -----------------------------------------------------------------------------------------

    def _nan_block(self, fault: Fault, step: int) -> bool:
        """Into a block that one generating sequence holds alone; the prefix cache may know it."""
        blocks = self._engine.scheduler.blocks
        held = [
            block
            for each in self._engine.scheduler.running
            if each.num_output_tokens and each.num_computed_tokens >= each.num_prompt_tokens
            for block in each.block_tables[0][: -(-each.num_computed_tokens // blocks.block_size)]
            if blocks._references[block] == 1
        ]
        if not held:
            return False
        block = held[fault.target % len(held)]
        poison_block(self._engine, block)
        self._nan_blocks[block] = []
        self._note_readers()
        return True

    def _watch_readers(self) -> None:
        schedule = self._engine.scheduler.schedule

        def watched() -> Any:
            step = schedule()
            self._note_readers()
            return step

        self._engine.scheduler.schedule = watched  # type: ignore[method-assign]

    def _note_readers(self) -> None:
        """A sequence that holds a block with a NaN may fail, until the first has; then none may find the block."""
        blocks = self._engine.scheduler.blocks
        for block, readers in list(self._nan_blocks.items()):
            is_gone = not blocks._references[block] and blocks._hashes[block] is None
            if is_gone or any(each.finish is FinishStatus.FINISHED_INTERNAL_ERROR for each in readers):
                del self._nan_blocks[block]
                continue
            readers += [each for each in self._engine.scheduler.running if block in each.held_blocks()]
            # A beam search numbers its prompts.
            names = [each.request_id for each in readers]
            self.poisoned |= {*names, *(name.removesuffix("-0") for name in names)}

    # ---- the grammar pool ----------------------------------------------------------------------------------------

    @property
    def _pool(self) -> GrammarPool | None:
        """With sessions in it."""
        pool = self._engine.masks.pool
        return pool if pool is not None and pool.session_ids else None

    def _late_masks(self, fault: Fault, step: int) -> bool:
        """A mask is there, but the engine does not see it for a while."""
        pool = self._pool
        if pool is None:
            return False
        if pool is not self._watched_pool:
            self._watched_pool = pool
            pool.is_ready = self._denying(pool.is_ready)  # type: ignore[method-assign]
        session_ids = pool.session_ids
        first = fault.target % len(session_ids)
        self._late_answers |= dict.fromkeys(session_ids[first:], fault.duration)
        return True

    def _denying(self, is_ready: Callable[[int], bool]) -> Callable[[int], bool]:
        def watched(session_id: int) -> bool:
            left = self._late_answers.pop(session_id, 0)
            if left > 1:
                self._late_answers[session_id] = left - 1
            return not left and is_ready(session_id)

        return watched

    def _kill_worker(self, fault: Fault, step: int) -> bool:
        pool = self._pool
        workers = [worker for worker in pool.workers.active if worker.sessions] if pool is not None else []
        if not workers:
            return False
        workers[fault.target % len(workers)].transport.kill()
        return True

    def _no_slots(self, fault: Fault, step: int) -> bool:
        """The next sessions that ask for a place on a worker are told that there is none."""
        pool = self._pool
        if pool is None:
            return False
        self._num_denied += fault.duration
        if pool is not self._full_pool:
            self._full_pool = pool
            pool._enter = self._denying_places(pool._enter)  # type: ignore[method-assign]
        return True

    def _denying_places(self, enter: Callable[..., bool]) -> Callable[..., bool]:
        def watched(*arguments: Any) -> bool:
            if self._num_denied:
                self._num_denied -= 1
                return False
            return enter(*arguments)

        return watched
