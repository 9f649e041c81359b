"""One model replica: the step loop that turns requests into tokens. Start reading here.

`Engine.step` does four things: *schedule, execute, prepare masks, update*. One loop serves every device:

- With an executor of depth 0, `step` returns the tokens of the step that it planned.
- With depth 1, `step` returns while its step is under way, and the caller delivers the tokens of the previous step
  while the device computes. The engine plans and launches a step before it knows the tokens of the previous one.
- With depth 1 and drafts, the engine waits for those tokens before it plans the next step. They decide how many drafts
  were accepted and which drafts come next. The caller still delivers them while the device computes. While the
  proposers rest, the engine plans ahead as without speculation. It also does so where drafts are so good that it pays
  to assume them accepted (`specdecode/run_ahead.py`).

A sequence that ends while a step is under way still has a row in that step. The engine ignores what the row draws.
Later steps overwrite the keys and values that it writes, because the device runs steps in order.

The engine deals in token ids only and has neither a tokenizer nor HTTP. One thread at a time may use it:
`cluster/llm.py` calls it directly, and `cluster/serve/engine/step_thread.py` runs it on a thread of its own behind Ray
Serve.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from manta.cluster.config import EngineConfig
from manta.cluster.engine.admission import check_request
from manta.cluster.engine.constraint_service import ConstraintService
from manta.cluster.engine.event_publisher import open_publisher
from manta.cluster.engine.executor_choice import make_executor
from manta.cluster.engine.executors.executor import Executor, StepCall, no_masks
from manta.cluster.engine.kept_prefixes import open_kept_prefixes
from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.request import Branch, EngineRequest, SequenceOutput
from manta.cluster.engine.resident_adapters import ResidentAdapters
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.cluster.engine.stats import EngineStats
from manta.cluster.engine.step_masks import EngineMasks, StepMasks
from manta.cluster.engine.step_plan import StepBudget
from manta.cluster.errors import refuse
from manta.specdecode.forced import ForcedProposer
from manta.specdecode.lengths import StepCost
from manta.structured.constraint import Resolved
from manta.structured.logits_processors import LogitsProcessorFactory, LogitsProcessorRegistry
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.stop_tokens import with_tokenizers_eos
from manta.workers.kv_groups import BlockNeeds
from manta.workers.model_info import ModelInfo
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepInput, StepOutOfMemory

logger = logger_of(__name__)

T = TypeVar("T")

IDLE_WAIT_S = 0.01
"""Longest wait in seconds of a step that can compute nothing until a mask arrives. The next step then
checks deadlines.
"""

IDLE_SLICE_S = 0.0002
"""Seconds that such a step sleeps between two checks for a mask or a message."""


class EngineDead(RuntimeError):
    """The engine cannot serve any more: two steps in a row failed, or the ranks could not be rebuilt."""


class _StepFailed(Exception):
    """The executor raised an error while it ran a step."""

    def __init__(self, step: StepInput, error: Exception) -> None:
        super().__init__(str(error))
        self.step = step
        self.error = error


class _StepUnderWay(NamedTuple):
    """A step that was submitted and whose tokens the engine has not read yet."""

    step: StepInput
    call: StepCall
    masks: StepMasks
    is_ahead: bool
    """Whether the step was planned before the tokens of the step before it were known."""
    has_drafts: bool


class Engine:
    """Serves requests on one model replica. Not thread-safe.

    `has_messages` returns whether the caller has messages to handle between two steps; a step that waits for a mask
    then returns. Without an `executor`, the engine makes one from the configuration. Raises `ModelError` or
    `ValueError` when the model or the configuration cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig,
        has_messages: Callable[[], bool] = lambda: False,
        executor: Executor | None = None,
    ) -> None:
        self.config = config
        self._has_messages = has_messages
        self.executor = executor or make_executor(config)
        self.model = with_generation_config(self.executor.model, config)
        self.max_model_len = self.model.max_model_len
        blocks = _make_blocks(config, self.model)
        self._id = secrets.token_hex(8)
        names = {each.digest: name for name, each in self.model.adapters.items()}
        self._publisher = open_publisher(config, self._id, blocks, names)
        keep_s, num_ranks = config.prefix_store_keep_s, config.num_ranks
        self._kept = open_kept_prefixes(blocks, self.executor, self.model, keep_s, num_ranks)
        self._settled_step = -1
        """The last step that has succeeded."""
        self.scheduler = Scheduler(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_sequences=config.max_num_sequences,
            max_model_len=self.max_model_len,
            blocks=blocks,
            num_lookahead_tokens=config.speculative.num_lookahead_tokens if config.speculative else 0,
            length_remedy=_length_remedy(config, self.model),
            num_steps_ahead=self.executor.depth if config.speculative is None else 0,
            max_draft_tokens=config.speculative.max_draft_tokens if config.speculative else 0,
            kept=self._kept,
            even_context=self.model.even_context,
        )
        self.constraints = ConstraintService(config, self.model)
        self.masks = EngineMasks(self.constraints, self.scheduler, _make_forced_proposer(config, self.model))
        self.processors = LogitsProcessorRegistry(config.logits_processors)
        self.idle_wait_s = IDLE_WAIT_S
        """Longest wait in seconds of a step that can compute nothing until a mask arrives."""
        self.alive = True
        self.is_rebuilding = False
        """Whether `Executor.rebuild` is running; no step completes until it returns."""
        self._under_way: deque[_StepUnderWay] = deque()
        """Submitted steps whose tokens the engine has not read yet, oldest first."""
        self._drafts_rest = False
        """Whether the steps after the one under way get no drafts from the ranks (`StepOutput.drafts_rest`)."""
        self._drafts_ahead = False
        """Whether drafts of the step under way are assumed to be accepted (`StepOutput.drafts_ahead`)."""
        self.adapters = ResidentAdapters(self.executor, self.scheduler, self.model.adapters.values())
        """The adapters that requests may have."""
        self._step_budget = StepBudget(config.max_num_batched_tokens)
        self._next_sequence_id = 0
        self._num_steps = 0
        self._num_steps_without_progress = 0
        self._last_progress = time.monotonic()
        self._recovering = False
        self._num_steps_checked = 0

    @property
    def vocab_size(self) -> int:
        """Token ids are in `[0, vocab_size)`."""
        return self.model.vocab_size

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def is_away(self) -> bool:
        """Whether no step may complete for some seconds, so that requests had better go on elsewhere: ranks are
        restarted, or a step is late. Other threads may ask.
        """
        return self.is_rebuilding or self.executor.is_late()

    @property
    def is_hung(self) -> bool:
        """Whether a step hangs that only the end of this process ends. Other threads may ask."""
        return self.executor.is_hung()

    @property
    def num_waiting(self) -> int:
        """The number of sequences in the queue. A sequence stands for all choices of its prompt until they fork."""
        return self.scheduler.num_waiting

    # ---- the step loop -------------------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Plans and starts one step; returns what finished steps added to each sequence that gained tokens or ended.

        These are the tokens of this step with depth 0, and those of the previous step with depth 1. Raises `EngineDead`
        if the executor fails twice in a row or cannot be rebuilt.
        """
        changes = self.scheduler.expire(time.monotonic())
        if not self.scheduler.has_unfinished:
            self._run_when_idle()
            return changes
        is_ahead = self._plans_ahead
        try:
            if not is_ahead and self._under_way:
                changes += self._update(most_under_way=0)
                if any(change.logprobs and not change.token_ids for change in changes):
                    return changes  # the caller chooses these sequences' tokens before the next step is planned
            # 1. Schedule: choose the tokens of each sequence by the masks and drafts known now.
            changes += self.masks.before_step()
            step = self.scheduler.schedule()
            step.assumes_drafts = any(each.has_drafts for each in self._under_way)
            if not (step.scheduled or self._computes) and self.scheduler.has_unfinished:
                self._wait_for_news()
            # 2. Execute: queue the forward pass behind the step under way, then read that step's tokens.
            call = self._ask(step, self.executor.submit, step)
            if self._under_way:
                changes += self._update(most_under_way=self.executor.depth - 1)
            # 3. Prepare masks: grammar workers fill them while the model runs. The draw uses the masks that are ready.
            masks = self.masks.begin(step)
            self._ask(step, call.draw, masks.collect)
            if is_ahead:  # otherwise `_update` ends these sequences
                changes += masks.end_sequences()
            has_drafts = self.executor.depth > 0 and any(item.draft_token_ids for item in step.scheduled)
            self._under_way.append(_StepUnderWay(step, call, masks, is_ahead, has_drafts))
            # 4. Update: append tokens, end sequences, and request the next masks.
            changes += self._update(most_under_way=self.executor.depth)
        except (_StepFailed, KeyboardInterrupt, SystemExit) as failure:
            self._void_steps(failure)
        self._send_last_ends()
        if self._kept is not None and self._kept.has_pending:
            self._kept.keep_next(self._settled_step, self._under_way[-1].step.step_id if self._under_way else -1)
        self._publish_events()
        return changes

    @property
    def _plans_ahead(self) -> bool:
        """Whether the next step is planned before the tokens of the step under way are known. With drafts these tokens
        decide where it goes on, unless the drafts are assumed to be accepted, and masks may bring forced tokens.
        """
        if self.executor.depth == 0 or self.config.speculative is None:
            return self.executor.depth > 0
        if self.masks.has_sessions or self.model.num_state_slots:
            return False
        return self._drafts_ahead or (self._drafts_rest and not any(each.has_drafts for each in self._under_way))

    @property
    def _computes(self) -> bool:
        """Whether a step under way computes anything."""
        return any(each.step.scheduled for each in self._under_way)

    def _update(self, most_under_way: int) -> list[SequenceOutput]:
        """Reads the oldest steps until at most `most_under_way` remain; returns what their sequences gained."""
        changes: list[SequenceOutput] = []
        while len(self._under_way) > most_under_way:
            step, call, masks, is_ahead, _ = self._under_way.popleft()
            output = self._ask(step, call.result)
            self._drafts_rest, self._drafts_ahead = output.drafts_rest, output.drafts_ahead
            self._settled_step = step.step_id
            if step.scheduled:
                self._step_went_well(step)
            masks.mark_forced(output)
            masks.mark_ends(output)
            gained = self.scheduler.update(step, output)
            if not is_ahead:  # otherwise the grammar workers already prepare the next step's masks
                gained += masks.settle()
            self._count_step(made_progress=bool(gained) or self.scheduler.has_advanced)
            changes += gained
        return changes

    def _ask(self, step: StepInput, call: Callable[..., T], *arguments: object) -> T:
        """Calls the executor. Raises `_StepFailed` from any `Exception` that the call raises."""
        try:
            return call(*arguments)
        except Exception as error:
            raise _StepFailed(step, error) from error

    def _void_steps(self, failure: BaseException) -> None:
        """Drops all steps under way after one of them failed; every sequence is recomputed from its known tokens.

        A KeyboardInterrupt or SystemExit may leave the ranks in the middle of a step: the engine rebuilds them, does
        not count a failure, and raises it again.
        """
        self._under_way.clear()
        self._drafts_rest = self._drafts_ahead = False
        if not isinstance(failure, _StepFailed):
            self._rebuild_ranks()
            raise failure
        self._recover(failure.step, failure.error)
        self._count_step(made_progress=False)

    def _wait_for_news(self) -> None:
        """Waits for a late mask or a message, at most `idle_wait_s`. Called when no sequence can compute anything."""
        deadline = time.monotonic() + self.idle_wait_s
        while not self.masks.is_late_mask_there() and not self._has_messages() and time.monotonic() < deadline:
            time.sleep(IDLE_SLICE_S)

    def _step_went_well(self, step: StepInput) -> None:
        self._recovering = False
        self._step_budget.count(step)
        self.scheduler.max_num_batched_tokens = self._step_budget.num_tokens

    def _recover(self, step: StepInput, error: Exception) -> None:
        """Rebuilds the ranks after a failed step; running sequences are recomputed from their tokens.

        Raises `EngineDead` at the second failure in a row. If the device ran out of memory, the next steps become
        smaller instead, and the failure does not count.
        """
        if isinstance(error, StepOutOfMemory) and step.num_tokens > 1:
            self._take_smaller_steps(step)
            return
        logger.error("step %d failed with %d sequences", step.step_id, len(step.scheduled), exc_info=error)
        if self._recovering:
            self.alive = False
            raise EngineDead(f"two steps in a row failed, last with {type(error).__name__}: {error}") from error
        self._recovering = True
        self._rebuild_ranks()

    def _take_smaller_steps(self, step: StepInput) -> None:
        """Halves the token budget of the next steps and rebuilds the ranks; sequences beyond the budget wait."""
        self._step_budget.shrink(step.num_tokens)
        self.scheduler.max_num_batched_tokens = self._step_budget.num_tokens
        logger.warning(
            "step %d had too little memory for %d tokens of %d sequences; the next steps have at most %d tokens. If "
            "this comes again, lower max_num_batched_tokens, max_num_sequences or kv_cache_fraction",
            step.step_id,
            step.num_tokens,
            len(step.scheduled),
            self._step_budget.num_tokens,
        )
        self._rebuild_ranks()

    def _rebuild_ranks(self) -> None:
        """Makes the ranks forget every sequence and queues the running ones to be recomputed. Raises `EngineDead` on
        failure.
        """
        self.is_rebuilding = True
        num_before = self.executor.num_rank_rebuilds
        try:
            self.executor.rebuild()
            if self.executor.num_rank_rebuilds > num_before:
                self.adapters.restore()
        except Exception as error:
            self.alive = False
            raise EngineDead(f"the ranks could not be rebuilt: {type(error).__name__}: {error}") from error
        finally:
            self.is_rebuilding = False
        self.scheduler.recompute_all()
        self._publish_events()
        if self._kept is not None:
            self._kept.forget_failed_steps()

    def check_ranks(self) -> None:
        """Rebuilds the ranks if one died while the engine was idle, so that the next request need not wait for the
        rebuild.

        Raises `EngineDead` if they cannot be rebuilt.
        """
        if self.alive and not self.has_unfinished and self.executor.has_lost_ranks():
            logger.error("a rank died while the engine was idle")
            self._rebuild_ranks()

    def _count_step(self, made_progress: bool) -> None:
        self._num_steps += 1
        if made_progress:
            self._last_progress = time.monotonic()
        else:
            self._num_steps_without_progress += 1

    def _send_last_ends(self) -> None:
        """Sends an empty step that tells the ranks to forget the last sequences, when no other step would tell them."""
        if not self.alive or self.scheduler.has_unfinished:
            return
        try:
            while self._under_way:  # all their sequences have ended, so the tokens are dropped
                step, call, *_ = self._under_way.popleft()
                self._ask(step, call.result)
            if self.scheduler.has_unsent_ends:
                step = self.scheduler.schedule()
                call = self._ask(step, self.executor.submit, step)
                self._ask(step, call.draw, no_masks)
                self._ask(step, call.result)
        except (_StepFailed, KeyboardInterrupt, SystemExit) as failure:
            self._void_steps(failure)

    def _run_when_idle(self) -> None:
        """Checks integrity once after each busy period, and keeps the prefixes that wait to be kept."""
        self._send_last_ends()
        self._publish_events()
        self.keep_prefixes()
        if self._num_steps_checked < self._num_steps:
            self.check_integrity()
            self._num_steps_checked = self._num_steps

    def keep_prefixes(self) -> None:
        """Has the ranks keep the prefixes that wait to be kept, until a message comes. Call it while nothing runs."""
        if self._kept is not None and not self.has_unfinished:
            self._kept.keep_all(is_wanted=self._has_messages)

    def _publish_events(self) -> None:
        """Hands over the events of the prefix cache, which a thread sends."""
        if self._publisher is not None:
            self._publisher.flush()

    def drop_kept(self, hashes: list[bytes]) -> None:
        """Removes the blocks with these hashes from the prefix store."""
        if self._kept is not None:
            self._kept.drop(hashes)

    # ---- requests ------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Starts the constraint compiler and the grammar pool in the background, so that the first constraint does not
        wait.

        Raises `RequestRefused` if the vocabulary of this model cannot be read.
        """
        self.constraints.start()

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory that `SamplingParams.logits_processors` may name. Raises `LogitsProcessorError` if the
        name is taken.
        """
        self.processors.register(name, factory)
        self.executor.register_logits_processor(name, factory)

    def add_request(
        self, request: EngineRequest, constraint: Resolved | None = None, queue_is_bounded: bool = True
    ) -> None:
        """Queues a request. `constraint` is the result of `resolve` for a request with a constraint.

        Raises `RequestRefused` if the request can never be served, `QueueFull` if the queue is full, and `EngineDead`
        after the engine has failed. A caller that has all its requests at hand and waits for all of them sets
        `queue_is_bounded` to False.
        """
        if not self.alive:
            raise EngineDead("the engine has failed; restart it")
        is_full = self.scheduler.num_waiting >= self.config.max_num_waiting + self._free_slots()
        if queue_is_bounded and is_full and not self._has_room_for(request.client):
            remedy, unit = "retry later or raise max_num_waiting", "requests are waiting"
            refuse("queue_full", "", self.scheduler.num_waiting, self.config.max_num_waiting, remedy, unit=unit)
        params = request.params
        check_request(request, self.vocab_size, self.scheduler.longest, self.processors, self.adapters)
        self.adapters.use(request.adapter)
        if constraint is not None:
            params = msgspec.structs.replace(params, constraint=constraint.spec)
        elif params.constraint is not None:
            raise ValueError("a request with a constraint comes with what `resolve` made of it")
        elif params.is_masked:
            self.constraints.start()
        if not self.scheduler.has_unfinished:
            self._last_progress = time.monotonic()
        for sequence in self._sequences(request, params.without_text(), constraint):
            self.scheduler.add(sequence)
        self._next_sequence_id += params.n

    def _sequences(
        self, request: EngineRequest, params: SamplingParams, constraint: Resolved | None
    ) -> Iterator[Sequence]:
        """Yields one sequence that stands for all choices. For a continued request, yields one for each choice that
        goes on.
        """
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        sequence = Sequence(
            sequence_id=self._next_sequence_id,
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            params=params,
            seed=seed,
            unforked=range(1, params.n),
            priority=request.priority,
            client=request.client,
            weight=request.weight,
            cache_root=request.chain_root,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            shares_answers=request.shares_answers,
            eos_token_ids=self.model.eos_token_ids,
            constraint=constraint,
            deadline=deadline,
            num_branches=request.num_branches,
            num_prompt_logprobs=request.num_prompt_logprobs,
            is_continued=request.continued is not None,
        )
        if not request.continued:
            yield sequence
        for choice in request.continued or ():
            yield sequence.resumed(choice)

    def branch(self, request_id: str, branches: list[Branch]) -> None:
        """Replaces the paused sequences of a request by the given continuations, each one token longer than its parent.

        A parent may have several continuations or none. The request must have `num_branches` set; an empty list ends
        it.
        """
        parents = {sequence.index: sequence for sequence in self.scheduler.of_request(request_id)}
        pairs = []
        for index, branch in enumerate(branches):
            parent = parents[branch.parent]
            pairs.append((parent, parent.continued(self._next_sequence_id, index, branch.token_id)))
            self._next_sequence_id += 1
        self.scheduler.branch(request_id, pairs)

    def _has_room_for(self, client: str) -> bool:
        """Returns whether a full queue still accepts one request of `client`.

        The queue does so if no request of this client waits, because other clients may have filled it. An eighth of the
        queue is added for such requests; the limit keeps a client that uses many names from growing the queue without
        bound.
        """
        limit = self.config.max_num_waiting + self._free_slots()
        if not client or self.scheduler.num_waiting >= limit + max(1, limit // 8):
            return False
        return all(sequence.client != client for sequence in self.scheduler.waiting)

    def _free_slots(self) -> int:
        return max(0, self.scheduler.max_num_sequences - self.scheduler.num_running)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """Ends a request and frees its blocks at once. Returns nothing for an unknown or ended request."""
        ended = self.scheduler.abort(request_id)
        self._send_last_ends()
        return ended

    def finish(self, request_id: str, index: int, num_kept_tokens: int) -> list[SequenceOutput]:
        """Ends one choice whose text reached a stop string; only `num_kept_tokens` output tokens count."""
        ended = self.scheduler.finish(request_id, index, num_kept_tokens)
        self._send_last_ends()
        return ended

    # ---- state ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError` where a block or a grammar session leaked or a reference is miscounted."""
        self.scheduler.check_integrity()
        self.masks.check_integrity()

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            engine_id=self._id,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            num_free_blocks=scheduler.blocks.num_free,
            num_blocks=self.model.num_blocks,
            num_cached_blocks=scheduler.blocks.num_cached,
            kv_cache_bytes=self.model.kv_cache_bytes,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_steps_without_progress=self._num_steps_without_progress,
            seconds_since_progress=time.monotonic() - self._last_progress if scheduler.has_unfinished else 0.0,
            alive=self.alive,
            is_away=self.is_away,
            num_constraints_compiled=self.constraints.num_compiled,
            num_late_rows=self.masks.num_late,
            num_dead_ends=self.masks.num_dead_ends,
            num_grammar_workers_replaced=self.constraints.num_replaced,
            num_rank_rebuilds=self.executor.num_rank_rebuilds,
            num_rank_disagreements=self.executor.num_rank_disagreements,
            grammar_pool=self.constraints.pool_stats(),
            drafts=scheduler.drafts,
            constraints=self.constraints.stats(),
        )


def with_generation_config(model: ModelInfo, config: EngineConfig) -> ModelInfo:
    """Returns the model with the tokenizer's end-of-sequence token beside its own, and without recommended sampling
    parameters if the configuration says so.
    """
    own, vocab_size = model.eos_token_ids, model.vocab_size
    eos_token_ids = with_tokenizers_eos(own, config.tokenizer or model.folder, vocab_size)
    defaults = model.sampling_defaults if config.generation_config == "auto" else {}
    return msgspec.structs.replace(model, eos_token_ids=eos_token_ids, sampling_defaults=defaults)


def _make_blocks(config: EngineConfig, model: ModelInfo) -> KVBlocks:
    """Returns the blocks of the KV cache, with the slots of recurrent states if the model has any."""
    sizes = config.block_size, config.enable_prefix_caching
    states = KVBlocks(model.num_state_slots, *sizes) if model.num_state_slots else None
    return KVBlocks(model.num_blocks, *sizes, model.groups, states)


def _length_remedy(config: EngineConfig, model: ModelInfo) -> str:
    """Returns the remedy that would admit longer sequences, as the end of an error message; empty if there is none."""
    needs = BlockNeeds(model.groups, config.block_size, config.max_num_batched_tokens + 1)
    if model.max_model_len == needs.longest(model.num_blocks, model.max_model_len + config.block_size):
        return ", or enlarge the KV cache (kv_cache_bytes)"
    return "" if config.max_model_len is None else ", or raise max_model_len"


def _make_forced_proposer(config: EngineConfig, model: ModelInfo) -> ForcedProposer | None:
    if config.speculative is None or "forced" not in config.speculative.proposers:
        return None
    return ForcedProposer(config.speculative, StepCost(model.step_costs) if model.step_costs else None)
