"""The offline interface returns these of a request, and follows how far each reader has read."""

from __future__ import annotations

import msgspec

from manta.cluster.chat.offline import Chat, Message
from manta.cluster.engine.request import FinishStatus, Usage
from manta.cluster.text.detokenizer import SequenceText
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.sampling_params import OutputKind, SamplingParams
from manta.workers.step import TokenLogprobs


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of a request: its output so far or, with `OutputKind.DELTA`, the new text, tokens and
    log-probabilities.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishStatus | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the text; None for end-of-sequence and length."""
    message: Message | None = None
    """Answer of a chat that has ended, in OpenAI's form: `content`, `reasoning_content` and `tool_calls`. The message
    may be appended to the conversation.
    """
    error: str | None = None
    """Reason why this choice ended with `FINISHED_INTERNAL_ERROR`; the others go on."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request's output so far, or with `OutputKind.DELTA` the new part. `finished` is set once every choice has
    ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry for each prompt token, the first of which is None; only if `prompt_logprobs` was asked for."""
    outputs: list[CompletionOutput]
    """The `n` choices in order of index."""
    finished: bool = False
    usage: Usage | None = None
    """The prompt counted once and the output tokens of all choices; set with `finished`."""


class TrackedRequest:
    """A request under way: its output so far, the text of each choice, and how much its reader has seen."""

    def __init__(
        self,
        output: RequestOutput,
        tokenizer: Tokenizer,
        params: SamplingParams,
        kind: OutputKind,
        chat: Chat | None = None,
    ) -> None:
        self.output = output
        self.kind = kind
        self._chat = chat
        self.texts = [
            SequenceText(
                tokenizer,
                params,
                kind is OutputKind.FINAL_ONLY,
                continues_prompt=chat is None,
                shown_ids=frozenset() if chat is None else chat.plan.shown_ids,
            )
            for _ in range(params.n)
        ]
        self.usages = [Usage(len(output.prompt_token_ids), 0, 0) for _ in range(params.n)]
        """Latest usage of each choice."""
        self._shown = [(0, 0) for _ in range(params.n)]
        """Characters and tokens that the reader has seen of each choice."""
        self._num_shown_prompt_logprobs = 0
        self._num_going_on = params.n
        """Choices that have not ended."""

    def end(self, choice: CompletionOutput) -> None:
        """Completes a choice that has ended, and with the last one the output."""
        output = self.output
        if self._chat is not None:
            stopped_itself = choice.finish_reason is FinishStatus.FINISHED_STOPPED and choice.stop_reason is None
            choice.message = self._chat.message(choice.text, is_cut=not stopped_itself)
        self._num_going_on -= 1
        if self._num_going_on == 0:
            output.usage = Usage.of_choices(len(output.prompt_token_ids), self.usages)
            output.finished = True

    def news(self) -> RequestOutput | None:
        """Returns what the reader gets now; None if that is nothing."""
        if self.kind is OutputKind.CUMULATIVE:
            return self.output
        if self.kind is OutputKind.FINAL_ONLY:
            return self.output if self.output.finished else None
        prompt_logprobs = self.output.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs[self._num_shown_prompt_logprobs :]
            self._num_shown_prompt_logprobs += len(prompt_logprobs)
        choices = [self._new_part(choice) for choice in self.output.outputs]
        return msgspec.structs.replace(self.output, outputs=choices, prompt_logprobs=prompt_logprobs)

    def _new_part(self, choice: CompletionOutput) -> CompletionOutput:
        num_characters, num_tokens = self._shown[choice.index]
        self._shown[choice.index] = len(choice.text), len(choice.token_ids)
        return msgspec.structs.replace(
            choice,
            text=choice.text[num_characters:],
            token_ids=choice.token_ids[num_tokens:],
            logprobs=None if choice.logprobs is None else choice.logprobs[num_tokens:],
        )


def snapshot(output: RequestOutput) -> RequestOutput:
    """Returns a copy that later steps do not change."""
    choices = [
        msgspec.structs.replace(
            choice, token_ids=list(choice.token_ids), logprobs=choice.logprobs and list(choice.logprobs)
        )
        for choice in output.outputs
    ]
    prompt_logprobs = output.prompt_logprobs and list(output.prompt_logprobs)
    return msgspec.structs.replace(output, outputs=choices, prompt_logprobs=prompt_logprobs)
