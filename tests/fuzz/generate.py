"""Makes a case from a seed: everything at once, in engines so small that it gets in each other's way.

A pure function of the seed: it draws from `random.Random` alone, whose integers are the same on every machine.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from manta.cluster.engine.beam_search import BeamSearchParams
from manta.structured.logits_processors import LogitsProcessorSpec
from manta.workers.sampling_params import OutputKind, SamplingParams
from tests.checkpoints import NATIVE_FAMILIES, VOCAB_SIZE
from tests.fuzz.cases import MASK_SECONDS, Case, Fault, Request, Settings
from tests.fuzz.grammars import CATALOGUE, HANGING
from tests.fuzz.processors import FACTORIES

EOS = 2
FIRST_TEXT_ID = 5
STOP_STRINGS = ("e", "th", " a", "o", "ing", "1", "}", "S", "ab", "é")

PROPOSERS = (("ngram",), ("forced",), ("forced", "ngram"), ("ngram", "forced"), ("draft",), ("forced", "draft"))
OVERLAPS: tuple[Any, ...] = ("thread", "off", "device", "off")
EXACT_FAMILIES = ("qwen3_5", "kimi_linear", "falcon_h1", "jamba", "minimax", "minicpm3", "lfm2")
SHARE_OF_STORMS = 0.12
"""Cases whose requests are each more urgent than the one before: each preempts those that run."""
SHARE_OF_ACTORS = 0.02
SHARE_OF_HANGS = 0.03
HANGING_MASK_SECONDS = 1.5


def generate(seed: int) -> Case:
    return _Generator(seed).case()


def generate_recurrent(seed: int) -> Case:
    """The same case on a model with recurrent states, beside attention in three of four cases, without actors."""
    case, family = generate(seed), "lfm2" if seed % 4 else "lfm2_convolutions"
    settings = msgspec.structs.replace(
        case.settings,
        family=family,
        pool_form="threads",
        max_num_sequences=min(case.settings.max_num_sequences, case.settings.num_blocks),
    )
    return msgspec.structs.replace(case, settings=settings)


def generate_exact(seed: int) -> Case:
    """The same case on an exact engine, on a model of one mixer after the other."""
    case = generate_recurrent(seed)
    settings = msgspec.structs.replace(case.settings, family=EXACT_FAMILIES[seed % len(EXACT_FAMILIES)], exact=True)
    return msgspec.structs.replace(case, settings=settings)


class _Generator:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)

    # ---- choices -------------------------------------------------------------------------------------------------

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._between(FIRST_TEXT_ID, VOCAB_SIZE - 1) for _ in range(count))

    # ---- the case ------------------------------------------------------------------------------------------------

    def case(self) -> Case:
        self._is_storm = self._chance(SHARE_OF_STORMS)
        self._hangs = self._chance(SHARE_OF_HANGS)
        self._settings = self._make_settings()
        self._stems = [self._tokens(self._between(8, 60)) for _ in range(2)]
        self._constrained_share = self._random.choice((0.5, 1.0, 1.0) if self._is_storm else (0, 0.3, 0.5, 0.9))
        count = self._between(20, 30) if self._is_storm else self._between(2, 12)
        requests = tuple(self._make_request(index) for index in range(count))
        faults = () if self._chance(0.3) else tuple(self._make_fault() for _ in range(self._between(1, 4)))
        return Case(seed=self._seed, settings=self._settings, requests=requests, faults=_bounded(faults))

    def _make_settings(self) -> Settings:
        choose = self._random.choice
        block_size = choose((8, 16, 16, 32))
        max_model_len = choose((48, 96, 160, 256))
        least = -(-max_model_len // block_size)
        family = choose((*NATIVE_FAMILIES, "qwen3_windows")) if self._chance(0.4) else "llama"
        draft_family = family if self._chance(0.5) else choose(NATIVE_FAMILIES)  # its own drafts are all accepted
        proposers: tuple[Any, ...] = choose(PROPOSERS) if self._chance(0.7) else ()
        return Settings(
            family=family,
            num_blocks=choose((least, least + 1, least + 3, 2 * least, 4 * least)),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=choose((40, 100, 2048) if self._is_storm else (1, 3, 7, 16, 40, 100, 2048, 2048)),
            max_num_sequences=self._between(1, 2) if self._is_storm else choose((1, 2, 3, 5, 8, 16)),
            enable_prefix_caching=self._chance(0.75),
            cheap_groups=self._chance(0.5),
            pool_form="actors" if self._chance(SHARE_OF_ACTORS) else "threads",
            num_grammar_workers=choose((1, 2, 2, 3)),
            mask_seconds=HANGING_MASK_SECONDS if self._hangs else MASK_SECONDS,
            proposers=proposers,
            draft_family=draft_family if "draft" in proposers else None,
            max_draft_tokens=choose((1, 2, 5, 8, 20)),
            ngram_min=choose((1, 1, 2, 3)),
            adaptive=self._chance(0.25),
            overlap=OVERLAPS[self._seed % len(OVERLAPS)],
        )

    # ---- requests ------------------------------------------------------------------------------------------------

    def _make_request(self, index: int) -> Request:
        longest = self._settings.max_length
        too_long = self._chance(0.02)
        prompt = self._make_prompt(longest + 1 if too_long else max(1, longest - self._between(2, 40)))
        room = max(1, longest - len(prompt))
        fields: dict[str, Any] = {
            "name": f"r{index}",
            "prompt": prompt,
            "step": 2 * index if self._is_storm else self._between(0, 30),
        }
        if self._settings.max_num_sequences > 1 and not self._is_storm and self._chance(0.08):
            return Request(**fields, beams=self._make_beams(room))
        return Request(
            **fields,
            params=self._make_params(room),
            priority=-index if self._is_storm else self._random.choice((0, 0, 0, -1, 1, -2)),
            deadline=self._between(1, 60) if self._chance(0.08) else None,
            abort=self._between(0, 40) if self._chance(0.12) else None,
        )

    def _make_prompt(self, longest: int) -> tuple[int, ...]:
        """Repetitive ones, ones that begin alike, and ones that end where a block does."""
        kind = self._random.choice(("random", "repetitive", "full", *(() if self._is_storm else ("stem", "stem"))))
        length = self._between(1, min(longest, 30 if self._is_storm else 90))
        if kind == "full":
            length = max(1, length // self._settings.block_size * self._settings.block_size)
        if kind == "repetitive":
            period = self._tokens(self._between(1, 6))
            return (period * length)[:length]
        if kind == "stem":
            stem = self._random.choice(self._stems)
            return (*stem, *self._tokens(self._between(0, 10)))[:longest]
        return self._tokens(min(length, longest))

    def _make_beams(self, room: int) -> BeamSearchParams:
        return BeamSearchParams(
            beam_width=self._between(2, min(4, self._settings.max_num_sequences)),
            max_tokens=self._between(1, min(room, 16)),
            length_penalty=self._random.choice((0.0, 1.0, 2.0)),
            early_stopping=self._random.choice((False, True, "never")),
            ignore_eos=self._chance(0.5),
        )

    def _make_params(self, room: int) -> SamplingParams:
        most = min(room, self._random.choice((24, 70) if self._is_storm else (6, 24, 70)))
        max_tokens = self._between(min(4, most), most)
        fields: dict[str, Any] = {
            "max_tokens": None if self._chance(0.1) else max_tokens,
            "seed": self._between(-(2**63), 2**63 - 1),
            "temperature": self._random.choice((0.0, 0.0, 0.5, 1.0, 1.5)),
            "output_kind": self._random.choice(tuple(OutputKind)),
        }
        if self._chance(0.3):
            fields["n"] = self._between(2, max(2, min(4, self._settings.max_num_sequences)))
        if self._chance(self._constrained_share):
            fields["constraint"] = HANGING if self._hangs and self._chance(0.3) else self._random.choice(CATALOGUE)
        if self._chance(0.15):
            spec = LogitsProcessorSpec(name=self._random.choice(sorted(FACTORIES)), arguments=self._make_arguments())
            fields["logits_processors"] = (spec,)
        if self._chance(0.5):
            fields["ignore_eos"] = True
        for share, make in ((0.2, self._narrowing), (0.25, self._penalties), (0.4, self._ends), (0.25, self._reports)):
            if self._chance(share):
                fields |= make(max_tokens)
        return SamplingParams(**fields)

    def _make_arguments(self) -> dict[str, Any]:
        if self._chance(0.7):
            return {}
        return {"fail_at": self._between(0, 12), "how": self._random.choice(("raise", "nan", "mask"))}

    def _narrowing(self, max_tokens: int) -> dict[str, Any]:
        fields: tuple[dict[str, Any], ...] = (
            {"top_p": 0.8},
            {"top_k": 12},
            {"min_p": 0.05},
            {"allowed_token_ids": self._tokens(30)},
            {"bad_words": ("the", " a", "e", "1")},
            {"bad_words_token_ids": tuple(self._tokens(self._between(1, 2)) for _ in range(20))},
            {"logit_bias": {token_id: float(self._between(-9, 9)) for token_id in self._tokens(5)}},
        )
        return self._random.choice(fields) | self._random.choice(fields)

    def _penalties(self, max_tokens: int) -> dict[str, Any]:
        fields = {"presence_penalty": 1.2, "frequency_penalty": 0.8, "repetition_penalty": 1.4}
        return {name: fields[name] for name in self._random.sample(sorted(fields), self._between(1, 3))}

    def _ends(self, max_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"min_tokens": self._between(0, max_tokens)}
        if self._chance(0.6):
            fields["stop"] = tuple(self._random.sample(STOP_STRINGS, self._between(1, 3)))
            fields["include_stop_str_in_output"] = self._chance(0.5)
        if self._chance(0.6):
            fields["stop_token_ids"] = self._tokens(self._random.choice((4, 12, 40)))
        if self._chance(0.3):
            fields["logit_bias"] = {EOS: 6.0}
        return fields

    def _reports(self, max_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": self._between(0, 4), "skip_special_tokens": self._chance(0.5)}
        if self._chance(0.5):
            fields["prompt_logprobs"] = self._between(0, 3)
        return fields

    # ---- faults --------------------------------------------------------------------------------------------------

    def _make_fault(self) -> Fault:
        kinds = ("raise_in_forward", "raise_after_forward", "raise_after_sample", "nan_block")
        mask_kinds = ("late_masks", "late_masks", "kill_worker", "no_slots")
        return Fault(
            kind=self._random.choice((*kinds, *mask_kinds) if self._constrained_share else kinds),  # type: ignore[arg-type]
            step=self._between(0, 50),
            target=self._between(0, 7),
            duration=self._between(1, 30),
        )


def _bounded(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """At most two dead workers: a third could be held against the mask that waited for all of them."""
    kills = [fault for fault in faults if fault.kind == "kill_worker"]
    return tuple(fault for fault in faults if fault not in kills[2:])
