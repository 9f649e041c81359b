"""The prefix cache tells a client nothing of another client's prompts: each API key has prefixes of its own."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.request import ContinuedChoice, EngineRequest, Usage
from manta.cluster.http.access.prefix_scope import PrefixScope, new_secret
from manta.workers.sampling_params import SamplingParams
from tests.async_tests import async_test
from tests.engine.test_engine import drain, make_engine
from tests.local_server import LocalServer, local_server

KEYS = {"alice": "the-secret-key-of-alice", "bob": "the-secret-key-of-bob"}
ENTRIES = tuple(f"{name}:{key}" for name, key in KEYS.items())
BLOCK = 8
SECRET_TOKEN = 77
PROMPT = [*range(20, 20 + BLOCK - 1), SECRET_TOKEN]
"""One block, whose last token another client wants to know."""


async def cached_tokens(server: LocalServer, name: str | None, prompt: list[int], **fields: Any) -> int:
    """Sends `prompt` and one more token with a client's key, and returns `usage`'s number of cached tokens."""
    headers = () if name is None else (f"Authorization: Bearer {KEYS[name]}",)
    status, body = await server.post(headers, prompt=[*prompt, 3], max_tokens=1, **fields)
    assert status == 200, body
    return json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def serving(**options: Any) -> Any:
    return local_server(engine_options={"block_size": BLOCK}, **options)


@async_test
async def test_a_client_cannot_guess_another_clients_prompt() -> None:
    """The attack asks once for each possible token and reads in `usage` which guess was in the cache."""
    async with serving(api_keys=ENTRIES) as server:
        assert await cached_tokens(server, "alice", PROMPT) == 0
        guesses = range(SECRET_TOKEN - 3, SECRET_TOKEN + 4)
        found = [await cached_tokens(server, "bob", [*PROMPT[:-1], guess]) for guess in guesses]
        assert found == [0] * len(guesses)
        assert await cached_tokens(server, "alice", PROMPT) == BLOCK, "a client's own prefixes are found"
        assert await cached_tokens(server, "bob", PROMPT) == BLOCK, "bob's own guess"


@pytest.mark.parametrize("is_shared", [False, True])
@async_test
async def test_the_operator_may_share_prefixes_between_keys(is_shared: bool) -> None:
    async with serving(api_keys=ENTRIES, share_prefix_cache=is_shared) as server:
        assert await cached_tokens(server, "alice", PROMPT) == 0
        assert await cached_tokens(server, "bob", PROMPT) == (BLOCK if is_shared else 0)


@async_test
async def test_a_salt_separates_requests_and_is_bounded() -> None:
    async with serving() as server:
        assert await cached_tokens(server, None, PROMPT) == 0
        assert await cached_tokens(server, None, PROMPT, cache_salt="mine") == 0
        assert await cached_tokens(server, None, PROMPT, cache_salt="mine") == BLOCK
        assert await cached_tokens(server, None, PROMPT) == BLOCK
        for salt, words in (("", "empty"), ("x" * 1025, "1025")):
            status, body = await server.post(cache_salt=salt)
            error = json.loads(body)["error"]
            assert (status, error["param"]) == (400, "cache_salt")
            assert words in error["message"]


def test_a_root_depends_on_secret_owner_and_salt() -> None:
    scope = PrefixScope(new_secret(), is_shared=False)
    roots = {scope.root(owner, salt) for owner in ("", "a", "ab") for salt in (None, "b", "a")}
    roots.add(PrefixScope(new_secret(), is_shared=False).root("a", None))
    assert len(roots) == 10
    assert {len(root) for root in roots} == {16}
    first, second = (hash_blocks(PROMPT * 2, 2, BLOCK, root=root) for root in sorted(roots)[:2])
    assert not {*first} & {*second}
    root = max(roots)
    assert hash_blocks(PROMPT * 2, 2, BLOCK, hash_blocks(PROMPT, 1, BLOCK, root=root), root) == hash_blocks(
        PROMPT * 2, 2, BLOCK, root=root
    )


def test_a_continued_stream_keeps_its_cache_root() -> None:
    """An engine that goes on with a stream of another engine registers its blocks under the same root."""
    engine = make_engine("llama")
    size, root = engine.scheduler.blocks.block_size, b"r" * 16
    tokens = list(range(5, 5 + 2 * size))
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=tokens[:size],
        params=SamplingParams(max_tokens=size + 2, temperature=0.0, ignore_eos=True),
        continued=[ContinuedChoice(0, tokens[size:], Usage(size, size, 0))],
        cache_root=root,
    )
    engine.add_request(request)
    while engine.scheduler.has_unfinished:
        engine.step()
    find = engine.scheduler.blocks.find_prefix
    assert len(find(hash_blocks(tokens, 2, size, root=root))) == 2
    assert not find(hash_blocks(tokens, 2, size))


def test_one_key_finds_as_much_as_none() -> None:
    """Chats under four system prompts, in a cache that holds a part of them: the same hits and the same tokens."""

    def served(root: bytes) -> tuple[int, int, list[list[int]]]:
        engine, chance = make_engine("llama", num_blocks=30), random.Random(1)
        systems = [[chance.randrange(5, 90) for _ in range(48)] for _ in range(4)]
        answers = []
        for number in range(40):
            prompt = [*chance.choice(systems), *(chance.randrange(5, 90) for _ in range(chance.randrange(1, 40)))]
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, cache_root=root)
            engine.add_request(request)
            answers.append([token for output in drain(engine) for token in output.token_ids])
        stats = engine.stats()
        return stats.prefix_cache_queries, stats.prefix_cache_hits, answers

    plain = served(b"")
    assert 0 < plain[1] < plain[0]
    assert served(PrefixScope(new_secret(), is_shared=False).root("alice", None)) == plain
