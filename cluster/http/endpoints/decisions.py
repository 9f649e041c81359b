"""`POST /v1/decisions`: the probabilities of the allowed answers to questions about an input. No text is generated.

Each allowed answer is a prompt of its own behind the question's, whose tokens the engines score. So the probabilities
are exact for answers of any length. The answers share the question's prompt in the prefix cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Sequence

from manta.cluster.chat.decided import AnswerPath, answer_paths, probabilities
from manta.cluster.errors import RequestRefused, error_of, refuse
from manta.cluster.http.endpoints import generation
from manta.cluster.http.exchange.answers import Scored
from manta.cluster.http.exchange.codec import EVENTS, encode
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.prompts import aside
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.decisions import Decision, DecisionRequest, DecisionUsage, answer_of
from manta.cluster.protocol.translated import renamed
from manta.structured.refusals import Refusal


async def decide(state: AppState, exchange: GenerationExchange, body: DecisionRequest) -> None:
    """Answers every question with probabilities."""
    request = await state.apart(exchange, body.as_openai)
    try:
        num_answers = sum(len(question.answers()) for question in body.questions)
        state.admission.check_generation(request, exchange.caller, num_prompts=num_answers)
        model = await state.generating_model()
        params = await generation.sampling_params(state, exchange, request)
        asked: list[list[AnswerPath]] = []
        prompts: list[list[int]] = []
        scored_from: list[int] = []
        num_tokens = 0
        for index, question in enumerate(body.questions):
            chat = await state.apart(exchange, body.chat, question)
            plan, prompt = await generation.prompted(state, exchange, chat)
            if plan.reasoning is not None:
                cause = "its chat template begins every answer with thinking, or leaves that to the model"
                refuse("unsupported", "model", remedy="ask a server with another model", cause=cause)
            field = f"questions[{index}]"
            paths = await aside(answer_paths, state.tokenizer, question.answers(), model.eos_token_ids, field)
            num_tokens += sum(len(prompt) + len(path.token_ids) for path in paths)
            state.admission.check_repeated(num_tokens)
            prompts += [[*prompt, *path.token_ids] for path in paths]
            scored_from += [max(1, len(prompt))] * len(paths)
            asked.append(paths)
        name = state.admission.check_model(body.model) or state.model_name
        answer = DecisionAnswer(body, asked, name)
        await generation.generate(state, exchange, prompts, params, request, answer, scored_from=scored_from)
    except RequestRefused as error:
        raise renamed(error, body) from error


class DecisionAnswer:
    """An answer of `/v1/decisions`, which is one part if it is streamed. `asked` has the paths of each question's
    answers, in the order of the prompts.
    """

    form = EVENTS

    def __init__(self, body: DecisionRequest, asked: Sequence[list[AnswerPath]], model: str) -> None:
        self._body = body
        self._asked = asked
        self._model = model

    async def whole(self, generation: Generation) -> bytes:
        found: list[list[float]] = [[] for _ in range(generation.num_choices)]
        async for event in Scored(generation):
            found[event.index] += [each.logprob for each in event.prompt_logprobs or ()]
        return encode(self._decision(found, generation))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        yield await self.whole(generation)

    def _decision(self, logprobs: list[list[float]], generation: Generation) -> Decision:
        answers, first = [], 0
        for question, paths in zip(self._body.questions, self._asked, strict=True):
            of_prompts = logprobs[first : first + len(paths)]
            own = [each[-len(path.token_ids) :] for path, each in zip(paths, of_prompts, strict=True)]
            if list(map(len, own)) != [len(path.token_ids) for path in paths]:
                raise error_of(Refusal("failed", cause="the engine gave an answer's tokens no probability"))
            if not all(map(math.isfinite, itertools.chain.from_iterable(own))):
                raise error_of(Refusal("failed", cause="the model gave an answer's token no finite log-probability"))
            answers.append(answer_of(question, probabilities(paths, own)))
            first += len(paths)
        num_tokens = sum(usage.num_prompt_tokens for usage in generation.usages)
        cached = sum(usage.num_cached_tokens for usage in generation.usages)
        usage = DecisionUsage(
            input_tokens=num_tokens,
            input_tokens_details={"cached_tokens": cached, "cache_write_tokens": 0},
            output_tokens=0,
            output_tokens_details={"reasoning_tokens": 0},
            total_tokens=num_tokens,
        )
        return Decision(model=self._model, answers=answers, usage=usage)
