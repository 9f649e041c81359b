"""KV events over ZeroMQ: a subscriber that reads vLLM's format knows what an engine's prefix cache holds.

`tests/engine/test_scheduler.py` checks the events of windows, recurrent states and lost ranks.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, load_config
from manta.cluster.engine.event_publisher import NUM_PORTS, Backlog, EventPublisher
from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheLog
from manta.cluster.kv_event_options import KVEventOptions, read_address
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kv_groups import ONE_GROUP, KVGroup
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.engine.gateway import Gateway
from tests.engine.llms import BLOCK_TOKENS, make_llm
from tests.local_server import local_server
from tests.patience import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
END = b"\xff" * 8
Message = tuple[bytes, int, bytes]
"""Topic, number and batch."""


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def options(**changes: Any) -> KVEventOptions:
    port = replay_port = free_port()
    while abs(replay_port - port) < NUM_PORTS:
        replay_port = free_port()
    values = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}"}
    return KVEventOptions(**(values | changes))


def replayed(context: zmq.Context, address: str | None, first: int = 0, empty: tuple[bytes, ...] = ()) -> list[Message]:
    """Asks for the messages from a number on, after the empty frame that some subscribers send."""
    assert address is not None
    asking = context.socket(zmq.DEALER)
    asking.connect(address.replace("*", "127.0.0.1"))
    asking.send_multipart([*empty, first.to_bytes(8, "big")])
    found: list[Message] = []
    while True:
        assert asking.poll(PATIENCE_S * 1000)
        *delimiter, topic, number, batch = asking.recv_multipart()
        assert delimiter == [*empty]
        if number == END:
            assert topic == batch == b""
            asking.close(linger=0)
            return found
        found.append((topic, int.from_bytes(number, "big"), batch))


def generate(llm: LLM, prompts: list[list[int]], **options: Any) -> None:
    llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    llm.engine.step()  # an idle one, which hands over what is left


def some_prompts(seed: int) -> list[list[int]]:
    """Prompts that share beginnings, too many for a small cache."""
    rng = random.Random(seed)
    stems = [rng.choices(range(5, 300), k=32) for _ in range(3)]
    return [rng.choice(stems) + rng.choices(range(5, 300), k=rng.randint(1, 40)) for _ in range(6)]


@pytest.mark.parametrize("empty", [(), (b"",)], ids=["AIBrix", "llm-d"])
def test_a_replay_tells_what_the_cache_holds(context: zmq.Context, empty: tuple[bytes, ...]) -> None:
    given = options(topic="kv@pod@{model}")
    llm = make_llm(num_blocks=24, kv_events=given, num_threads=1)
    for seed in range(3):
        generate(llm, some_prompts(seed))
    messages = replayed(context, given.replay_endpoint, empty=empty)
    assert [number for _, number, _ in messages] == list(range(len(messages)))
    assert {topic for topic, _, _ in messages} == {f"kv@pod@{checkpoint('llama').name}".encode()}
    gateway = Gateway()
    assert {gateway.read(batch) for _, _, batch in messages} == {0}
    gateway.check(llm.engine.scheduler.blocks)
    assert gateway.kinds == {0: ("full_attention", None)}
    assert len(gateway.tokens) > 24, "blocks were evicted"
    assert replayed(context, given.replay_endpoint, len(messages) - 2, empty) == messages[-2:]


@pytest.mark.prove
def test_dynamos_indexer_knows_how_much_of_a_prompt_is_cached() -> None:
    """The subscriber of another project: `python -m dynamo.indexer` (`pip install ai-dynamo-runtime`)."""
    pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed")
    given, port = options(), free_port()
    llm = make_llm(num_blocks=24, kv_events=given, num_threads=1)
    blocks, asked = llm.engine.scheduler.blocks, some_prompts(0)
    generate(llm, asked)
    indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"])
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S)

    def is_there() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return client.get("/workers").status_code == 200
        return False

    def agrees(prompt: list[int]) -> bool:
        """Returns whether it says what the cache holds."""
        answer = client.post("/query", json={"token_ids": prompt, "model_name": "m"}).json()
        hashes = hash_blocks(prompt, len(prompt) // BLOCK_TOKENS, BLOCK_TOKENS)
        num_cached = BLOCK_TOKENS * len(blocks.find_prefix(hashes))
        return answer["scores"] == ({"1": {"0": num_cached}} if num_cached else {})

    def agrees_about_all() -> bool:
        return all(map(agrees, asked))

    try:
        wait_until(is_there)
        addresses = {name: getattr(given, name).replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")}
        worker = {"instance_id": 1, "model_name": "m", "block_size": BLOCK_TOKENS, "dp_rank": 0, **addresses}
        assert client.post("/register", json=worker).status_code == 201
        for seed in range(1, 4):
            generate(llm, some_prompts(seed))
            asked.extend(some_prompts(seed))
            wait_until(agrees_about_all)
        assert any(blocks.find_prefix(hash_blocks(prompt, 1, BLOCK_TOKENS)) for prompt in asked)
    finally:
        indexer.terminate()
        indexer.wait(PATIENCE_S)


def test_an_engine_connects_to_a_subscriber_that_listens(context: zmq.Context) -> None:
    """Whatever is lost before the connection stands is replayed."""
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    given = options(endpoint=f"tcp://127.0.0.1:{port}", topic="{engine}|{model}")
    llm = make_llm(kv_events=given, num_threads=1)
    prompts = iter(range(1000))
    while not subscriber.poll(100):
        generate(llm, some_prompts(next(prompts)))
    generate(llm, some_prompts(next(prompts)))
    everything = replayed(context, given.replay_endpoint)
    heard = [subscriber.recv_multipart()]
    while int.from_bytes(heard[-1][1], "big") < everything[-1][1]:
        assert subscriber.poll(PATIENCE_S * 1000)
        heard.append(subscriber.recv_multipart())
    numbered = [(topic, int.from_bytes(number, "big"), batch) for topic, number, batch in heard]
    assert numbered == everything[-len(heard) :]
    assert heard[0][0].decode() == f"{llm.engine.stats().engine_id}|{checkpoint('llama').name}"


def test_whoever_knew_an_earlier_engine_hears_of_a_new_one(context: zmq.Context) -> None:
    given = options(replay_endpoint=None)
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"kv@")
    subscriber.connect(given.endpoint.replace("*", "127.0.0.1"))
    for _ in range(2):
        publisher = EventPublisher(CacheLog(ONE_GROUP, 16, {}), given, "kv@pod@m", PATIENCE_S)
        publisher.flush()
        assert subscriber.poll(PATIENCE_S * 1000)
        topic, number, batch = subscriber.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"kv@pod@m", 0)
        assert msgspec.msgpack.decode(batch)[1] == [{"type": "AllBlocksCleared"}]
        publisher.close()


def test_engines_of_a_node_listen_at_one_port_after_the_other(context: zmq.Context) -> None:
    given = options()
    logs = [CacheLog(ONE_GROUP, 16, {}) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for log in logs:
            publisher = EventPublisher(log, given, "t", join_s=0.0)
            stack.callback(publisher.close)
            publisher.flush()
            replays = read_address("replay_endpoint", given.replay_endpoint or "")
        ranks = []
        for offset in range(2):
            ((_, _, batch),) = replayed(context, replays.plus(offset))
            ranks.append(Gateway().read(batch))
    assert ranks == [0, 1]
    again = EventPublisher(CacheLog(ONE_GROUP, 16, {}), given, "t", join_s=0.0)
    again.flush()
    ((_, _, batch),) = replayed(context, given.replay_endpoint)
    again.close()
    assert Gateway().read(batch) == 0, "the ports were given back"


def test_only_so_many_batches_are_kept(context: zmq.Context) -> None:
    given = options(replay_batches=3)
    log = CacheLog(ONE_GROUP, 16, {})
    publisher = EventPublisher(log, given, "t", join_s=0.0)
    for _ in range(5):
        log.clear()
        publisher.flush()
    assert [number for _, number, _ in replayed(context, given.replay_endpoint)] == [2, 3, 4]
    publisher.close()


def test_a_thread_that_does_not_keep_up_costs_events_and_no_time() -> None:
    """A subscriber then knows too few blocks, and none that are not there."""
    backlog = Backlog(limit=3)
    for number in range(5):
        backlog.add([BlockRemoved([number], "GPU", 0)])
    backlog.end()
    found = []
    while (events := backlog.take(None)) is not None:
        found.append(events)
    assert found == [[AllBlocksCleared(), BlockRemoved([3], "GPU", 0)], [BlockRemoved([4], "GPU", 0)]]


class Chain(msgspec.Struct):
    token_ids: list[int]
    block_hashes: list[bytes]
    adapter: str = ""
    cache_salt: str = ""


def test_events_name_adapters_salts_and_kinds_of_layers() -> None:
    log = CacheLog((KVGroup(), KVGroup(window=7)), 2, {"ab": "poet"})
    log.take()
    chain = Chain(list(range(6)), [bytes([number] * 16) for number in range(1, 4)], "ab", "secret")
    for number in range(3):
        for group in range(3):
            log.store(chain, number, group)
    stored = log.take()
    expected = {0: ("full_attention", None), 1: ("sliding_window", 7), 2: ("mamba", None)}
    for event, (group, (kind, window)) in zip(stored, expected.items(), strict=True):
        assert isinstance(event, BlockStored)
        assert (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (group, kind, window)
        assert event.token_ids == chain.token_ids
        assert (event.lora_name, event.extra_keys) == ("poet", [["secret"], None, None])
    log.remove(chain.block_hashes[2], 0)
    log.store(chain, 2, 0)
    removed, again = log.take()
    assert isinstance(removed, BlockRemoved)
    assert isinstance(again, BlockStored)
    assert (again.parent_block_hash, again.extra_keys) == (stored[0].block_hashes[1], None)
    for adapter, name in (("ab*0.5", "poet*0.5"), ("cd", "cd"), ("", None)):
        log.store(Chain([1, 2], [bytes([9] * 16)], adapter), 0, 0)
        (event,) = log.take()
        assert isinstance(event, BlockStored)
        assert event.lora_name == name


@async_test
async def test_a_clients_salt_is_told(context: zmq.Context) -> None:
    given = options()
    async with local_server(engine_options={"kv_events": given}) as server:
        prompt = list(range(5, 45))
        for salt in (None, "mine"):
            status, _ = await server.post(prompt=prompt, max_tokens=2, cache_salt=salt)
            assert status == 200
        await server.until_idle()
        gateway = Gateway()
        for _, _, batch in replayed(context, given.replay_endpoint):
            gateway.read(batch)
    assert list(gateway.salts.values()) == ["mine"]
    assert len(gateway.stored[0]) == 4, "two blocks of each request"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"endpoint": "ipc:///tmp/a"}, "endpoint"),
        ({"endpoint": "tcp://*:0"}, "endpoint"),
        ({"endpoint": "tcp://*"}, "endpoint"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://gateway:5558"}, "replay_endpoint"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}, "replay_endpoint"),
        ({"endpoint": "tcp://*:5557", "topic": "kv@{pod}"}, "topic"),
        ({"endpoint": "tcp://*:5557", "publisher": "zmq"}, "publisher"),
    ],
    ids=["not tcp", "no port", "port missing", "elsewhere", "one port", "placeholder", "unknown"],
)
def test_what_means_nothing_is_refused(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"kv_events.*{field}"):
        load_config(None, {"engine.kv_events": wrong})


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        EngineConfig(kv_events=options(), enable_prefix_caching=False)


def test_without_pyzmq_an_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ValueError, match=r"manta-serve\[kv-events\]"):
        EventPublisher(CacheLog(ONE_GROUP, 16, {}), options(), "t")


def test_ports_that_others_hold_are_refused() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        for taken in range(port, port + NUM_PORTS):
            with contextlib.suppress(OSError):  # yet another program holds it
                stack.enter_context(socket.create_server(("", taken)))
        with pytest.raises(ValueError, match=f"{NUM_PORTS} ports from {port}"):
            EventPublisher(CacheLog(ONE_GROUP, 16, {}), options(endpoint=f"tcp://*:{port}"), "t")
