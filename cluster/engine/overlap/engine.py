"""The step loop for a device that should never wait for the host: each step is launched before the tokens of the one
before it are known here.

Beside `Engine.step`, whose four phases are here in another order: *schedule, execute, update, prepare masks*, and the
update is that of the step before. While the device computes a step, the host learns the tokens of the step before it,
ends what they end, prepares the masks and plans the next step. What has ended by then still has a row in the step under
way: nobody reads what it draws, and later steps overwrite what it computes, since the device keeps their order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cluster.config import EngineConfig
from cluster.engine import engine
from cluster.engine.executor import Executor, InProcessExecutor
from cluster.engine.overlap.stream import DeviceStream, Drawn, Stream, ThreadStream
from cluster.engine.request import SequenceOutput
from workers.step import StepInput, StepOutput

logger = logging.getLogger(__name__)

SYNCHRONOUS_PLATFORMS = ("cpu",)
"""Whose calls wait until the work is done. `overlap: auto` leaves them to the plain loop: the model takes every core,
and the host's work beside it would take one of them away.
"""


class StepUnderWay(NamedTuple):
    """A step that was launched, and its tokens once they are drawn."""

    step: StepInput
    drawn: Drawn


class _Nothing:
    def result(self) -> StepOutput:
        return StepOutput(-1)


NOTHING = StepUnderWay(StepInput(-1), _Nothing())
"""No step is under way."""


class OverlappedEngine(engine.Engine):
    """An engine with one step under way between two calls of `step`, without speculation."""

    def __init__(self, config: EngineConfig, has_messages: Callable[[], bool], stream: Stream) -> None:
        self._stream = stream
        self._under_way = NOTHING
        super().__init__(config, has_messages, stream)

    # ---- the step loop -------------------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Launches one step; returns what the step before it added to each sequence that gained tokens or ended."""
        changes = self.scheduler.expire(time.monotonic())
        if not self.scheduler.has_unfinished:
            self._run_when_idle()
            return changes
        # 1. Schedule: who computes what, as if the step under way had drawn its tokens already.
        changes += self.masks.before_step()
        step, last = self.scheduler.schedule(), self._under_way.step
        if not (step.scheduled or last.scheduled) and self.scheduler.has_unfinished:
            self._wait_for_news()
        with self._whole_steps():
            # 2. Execute: the forward pass is launched behind the step under way, whose tokens stay on the device.
            output = self._launch(step)
            if output is None:
                return changes
            # 3. Update: sequences gain the tokens of the step before, and end, while the device computes this one.
            changes += self.scheduler.update(last, output)
            # 4. Prepare masks: grammar workers fill them while the model runs. The draw waits behind the forward pass.
            masks = self.masks.begin(step)
            drawn = self._stream.draw(masks.collect(self._stream.is_computing))
            changes += masks.end_sequences()
            self._under_way = StepUnderWay(step, drawn)
        if last.scheduled or not step.scheduled:  # the first step of a spell of work brings nothing yet
            self._count_step(made_progress=bool(changes) or self.scheduler.has_advanced)
        self._send_last_ends()
        return changes

    def _launch(self, step: StepInput) -> StepOutput | None:
        """Starts a step, and waits for the tokens of the one under way. If either failed, both are void: every sequence
        is computed again from the tokens that are known, and the result is None.
        """
        last, self._under_way = self._under_way, NOTHING
        at_fault = step if step.num_tokens else last.step
        try:
            self._stream.execute(step)
            at_fault = last.step
            output = last.drawn.result()
        except Exception as error:
            self._recover(at_fault, error)
            return None
        if last.step.scheduled:
            self._step_went_well(last.step)
        return output

    @contextlib.contextmanager
    def _whole_steps(self) -> Iterator[None]:
        """A KeyboardInterrupt leaves the ranks with half a step, and is no failure."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._under_way = NOTHING
            self._rebuild_ranks()
            raise

    def _send_last_ends(self) -> None:
        if self.alive and not self.scheduler.has_unfinished:
            self._drop_step_under_way()
        super()._send_last_ends()

    def _drop_step_under_way(self) -> None:
        """All its sequences have ended."""
        last, self._under_way = self._under_way, NOTHING
        try:
            last.drawn.result()
        except Exception as error:
            self._recover(last.step, error)


# ---- which loop ------------------------------------------------------------------------------------------------------


def make_engine(config: EngineConfig, has_messages: Callable[[], bool] = lambda: False) -> engine.Engine:
    """An engine with the loop that `config.overlap` asks for. Raises what `Engine` raises, and `ValueError` if the
    overlapped loop is asked for where it cannot be.
    """
    if config.overlap == "on" and config.speculative is not None:
        raise ValueError(
            "overlap: on does not go with speculation, whose drafts are planned from tokens that are known; "
            "set overlap to auto, or leave speculation out"
        )
    executor = engine.make_executor(config)
    if config.speculative is None and config.overlap != "off":
        stream = _stream(executor, config.overlap == "on")
        if stream is not None:
            logger.info("a step is launched before the tokens of the one before it are known (overlap)")
            return OverlappedEngine(config, has_messages, stream)
    return engine.Engine(config, has_messages, executor)


def _stream(executor: Executor, is_wanted: bool) -> Stream | None:
    """Around the executor; None where the plain loop is faster, unless the other one is wanted."""
    if isinstance(executor, InProcessExecutor) and executor.model.platform not in SYNCHRONOUS_PLATFORMS:
        return DeviceStream(executor)
    return ThreadStream(executor) if is_wanted else None
