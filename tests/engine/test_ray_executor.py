"""The executor over Ray actors: the tokens of the engine's own process, on one node or two, and through any rank's end.

A real Ray of two nodes on this machine. One engine serves most tests: what one of them breaks, the next one finds
rebuilt.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from manta.cluster import own_ray
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine, EngineDead
from manta.cluster.engine.executors.deadline import StepTimes
from manta.cluster.engine.executors.thread_executor import ThreadExecutor
from manta.cluster.engine.ranks import rank_channel
from manta.cluster.engine.ranks.claims import (
    CannotPlace,
)
from manta.cluster.engine.ranks.rank_channel import RankLost
from manta.cluster.engine.ranks.rank_group import RankGroup, ReloadTimes
from manta.cluster.engine.ranks.rank_messages import Message, Step
from manta.cluster.engine.ranks.ray_executor import RayExecutor
from manta.cluster.engine.request import EngineRequest
from manta.cluster.llm import LLM, ConstraintSpec, LogitsProcessorSpec, RequestOutput, SamplingParams
from manta.structured.refusals import RequestRefused
from manta.workers.models.model_config import ModelError
from manta.workers.ranks.rank_worker import ReadAdapter
from manta.workers.step import ScheduledSequence, StepInput
from tests.adapters import Adapters, adapters_of
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.engine_parts import device_of
from tests.patience import PATIENCE_S, wait_until

ray = pytest.importorskip("ray")

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 1 << 24, "num_threads": 1, "max_num_sequences": 32}
PROMPTS = [[5, 6, 7], [8, 9], [30, 31, 32, 33], [40]]
NUM_TOKENS = 24
REQUEST_NUMBERS = itertools.count()


class Only:
    """A logits processor that leaves one token, another one at each position."""

    def __init__(self, arguments: dict[str, Any], prompt: Any, output: Any, vocab_size: int) -> None:
        self.first = arguments["first"]

    def __call__(self, output: np.ndarray, logits: Any) -> None:
        logits[: self.first + len(output)] = -float("inf")
        logits[self.first + len(output) + 1 :] = -float("inf")


def params() -> list[SamplingParams]:
    """Greedy, seeded with logprobs, several choices, under a grammar, with a processor."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    regex = ConstraintSpec(kind="regex", text="[a-f]{8}-[0-9]{60}")
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(seed=7, logprobs=2, prompt_logprobs=1, **common),
        SamplingParams(seed=3, n=3, repetition_penalty=1.2, **common),
        SamplingParams(seed=5, constraint=regex, **common),
        SamplingParams(logits_processors=(LogitsProcessorSpec(name="only", arguments={"first": 50}),), **common),
    ]


def submit(llm: LLM) -> list[str]:
    prompts = [*PROMPTS, PROMPTS[0]]
    ids = [f"{next(REQUEST_NUMBERS)}" for _ in prompts]
    for request_id, prompt, one in zip(ids, prompts, params(), strict=True):
        llm.add_request(request_id, prompt, one)
    return ids


def finish(llm: LLM, ids: list[str]) -> list[list[tuple[Any, ...]]]:
    """What tells two runs apart: tokens, numbers of log-probabilities, and ends."""
    ended: dict[str, RequestOutput] = {}
    while len(ended) < len(ids):
        ended |= {output.request_id: output for output in llm.step() if output.finished}
    llm.step()  # checks that nothing leaked
    return [
        [
            (choice.token_ids, len(choice.logprobs or []), choice.finish_reason, choice.error)
            for choice in ended[one].outputs
        ]
        for one in ids
    ]


def executor(llm: LLM) -> RayExecutor:
    found = device_of(llm.engine)
    assert isinstance(found, RayExecutor)
    return found


def make_llm(family: str = "llama", **options: Any) -> LLM:
    llm = LLM(str(checkpoint(family, dtype="float32")), **OPTIONS | options)
    if llm.config.tensor_parallel_size > 1:  # no rank is given up because the machine is busy
        executor(llm).deadline.times = StepTimes(shortest_s=PATIENCE_S)
    llm.register_logits_processor("only", Only)
    return llm


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[Any, ...]]]:
    llm = make_llm()
    return finish(llm, submit(llm))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes: the first has room for two ranks of one thread, the second for one."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, own_ray._without_extras():
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "false")  # ranks have an environment, which these would lack
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """After a rank has failed, the others have five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_channel, "FAILED_PATIENCE_S", 5.0)
        yield


@pytest.fixture(scope="module")
def llm(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    options: dict[str, Any] = {
        "kv_cache_bytes": None,
        "kv_cache_fraction": 1e-3,
        "adapter_roots": [str(tmp_path_factory.getbasetemp())],
    }
    return make_llm(tensor_parallel_size=2, placement_strategy="SPREAD", **options)


def test_two_nodes_draw_the_tokens_of_one_process(llm: LLM, expected: list[Any]) -> None:
    assert finish(llm, submit(llm)) == expected
    assert finish(llm, submit(llm)) == expected
    placed = ray.util.placement_group_table(executor(llm)._group._placement)["bundles_to_node_id"]
    assert len(set(placed.values())) == 2
    stats = llm.engine.stats()
    assert stats.num_rank_rebuilds == stats.num_rank_disagreements == 0


@pytest.mark.parametrize("ranks", [[1, 0, 1, 0] * 5 if PROVE else [0]], ids=str)
def test_killing_ranks_one_by_one_costs_no_token(llm: LLM, expected: list[Any], ranks: list[int]) -> None:
    """Each is killed in the middle of a run. The engine serves from one death to the next, with the blocks that its
    scheduler knows of, however much memory is free then.
    """
    num_rebuilds, num_blocks = llm.engine.stats().num_rank_rebuilds, llm.engine.model.num_blocks
    for rank in ranks:
        ids = submit(llm)
        for _ in range(4):
            llm.step()
        os.kill(executor(llm).rank_pids[rank], signal.SIGKILL)
        assert finish(llm, ids) == expected
        assert executor(llm).model.num_blocks == num_blocks
    stats = llm.engine.stats()
    assert stats.num_rank_rebuilds == num_rebuilds + len(ranks)
    assert stats.num_rank_disagreements == 0


def test_an_idle_engine_rebuilds_a_rank_that_died(llm: LLM, expected: list[Any]) -> None:
    """The next request finds the ranks there."""
    num_rebuilds = llm.engine.stats().num_rank_rebuilds
    pid = executor(llm).rank_pids[1]
    llm.engine.check_ranks()
    assert executor(llm).rank_pids[1] == pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: executor(llm).has_lost_ranks())
    llm.engine.check_ranks()
    assert llm.engine.stats().num_rank_rebuilds == num_rebuilds + 1
    assert finish(llm, submit(llm)) == expected
    assert llm.engine.stats().num_rank_rebuilds == num_rebuilds + 1


@pytest.fixture(scope="module")
def made() -> Adapters:
    adapters = adapters_of(checkpoint("llama", dtype="float32"))
    for seed, name in enumerate(("first", "second")):
        adapters.add(name, 70 + seed)
    return adapters


def with_adapters(llm: LLM, *digests: str, victim: int | None = None) -> list[list[int]]:
    """Greedy tokens of one batch with a row for each digest, in which a rank is killed after four steps."""
    engine = llm.engine
    ids = {f"{next(REQUEST_NUMBERS)}": digest for digest in digests}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for name, digest in ids.items():
        engine.add_request(EngineRequest(request_id=name, prompt_token_ids=PROMPTS[0], params=params, adapter=digest))
    found: dict[str, list[int]] = {name: [] for name in ids}
    for number in itertools.count():
        if not engine.has_unfinished:
            break
        if number == 4 and victim is not None:
            os.kill(executor(llm).rank_pids[victim], signal.SIGKILL)
        for output in engine.step():
            found[output.request_id] += output.token_ids
    engine.step()  # checks that nothing leaked
    return list(found.values())


def test_ranks_read_adapters_beside_the_steps_and_get_them_back_when_they_restart(llm: LLM, made: Adapters) -> None:
    engine, folders = llm.engine, {}

    def find(digest: str) -> ReadAdapter:
        return engine.executor.read_adapter(folders[digest])

    engine.adapters.find = find
    for name in ("first", "second"):
        adapter = engine.executor.read_adapter(made.folders[name])
        folders[adapter.digest] = made.folders[name]
        assert engine.adapters.hold(adapter)
    expected = [made.greedy(PROMPTS[0], name, NUM_TOKENS) for name in ("first", "second", "")]
    assert len({tuple(each) for each in expected}) == len(expected)
    assert with_adapters(llm, *folders, "") == expected
    with pytest.raises(ModelError):
        engine.executor.read_adapter(str(pathlib.Path(made.folders["first"]).parent))
    first, second = folders
    for victim in (0, 1) if PROVE else (1,):
        assert with_adapters(llm, first, victim=victim) == expected[:1]
        assert engine.adapters.loaded == (first,), "the other one comes back when a request names it"
        with pytest.raises(ConnectionError):
            engine.adapters.hold(adapter)
        adapter = find(second)
        assert engine.adapters.hold(adapter)
        assert with_adapters(llm, second, first, "") == [expected[1], expected[0], expected[2]]
    for digest in folders:
        assert engine.adapters.drop(digest)
    with pytest.raises(RequestRefused):
        with_adapters(llm, first)


@pytest.fixture
def overlapped(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The same ranks under the other loop."""
    plain = llm.engine
    engine = Engine(plain.config, executor=ThreadExecutor(executor(llm)))
    engine.processors = plain.processors
    monkeypatch.setattr(LLM, "engine", engine)
    return llm


@pytest.mark.parametrize("num_deaths", [20 if PROVE else 0])
def test_the_overlapped_loop_draws_the_same_tokens(overlapped: LLM, expected: list[Any], num_deaths: int) -> None:
    """Also where a rank dies while the next step is under way behind the one that runs."""
    assert finish(overlapped, submit(overlapped)) == expected
    num_rebuilds = overlapped.engine.stats().num_rank_rebuilds
    for number in range(num_deaths):
        ids = submit(overlapped)
        for _ in range(4 + number % 3):
            overlapped.step()
        os.kill(executor(overlapped).rank_pids[number % 2], signal.SIGKILL)
        assert finish(overlapped, ids) == expected
    stats = overlapped.engine.stats()
    assert stats.num_rank_rebuilds == num_rebuilds + num_deaths
    assert stats.num_rank_disagreements == 0


def test_an_unstartable_sequence_costs_no_step(llm: LLM, expected: list[Any]) -> None:
    """Its seed overflows a table of every rank. The ranks are not rebuilt."""
    before = llm.engine.stats().num_rank_rebuilds
    ids = submit(llm)
    llm.add_request("bad", [5, 6], SamplingParams(max_tokens=NUM_TOKENS))
    (sequence,) = llm.engine.scheduler.of_request("bad")
    sequence.seed = 2**63
    *good, ((tokens, _, reason, error),) = finish(llm, [*ids, "bad"])
    assert good == expected
    assert (tokens, reason) == ([], "error")
    assert "could not be started: OverflowError" in error
    assert llm.engine.stats().num_rank_rebuilds == before


def test_masks_may_take_the_forward_passs_time(llm: LLM) -> None:
    """A rank that stands still computes; the others wait for it."""
    ranks, scheduler = executor(llm), llm.engine.scheduler
    llm.add_request("masks", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1))
    step = scheduler.schedule()
    os.kill(ranks.rank_pids[1], signal.SIGSTOP)
    try:
        ranks.execute(step)
        assert ranks.is_computing()
        assert ranks.is_computing()
    finally:
        os.kill(ranks.rank_pids[1], signal.SIGCONT)
    wait_until(lambda: not ranks.is_computing())
    (output,) = scheduler.update(step, ranks.sample())
    assert len(output.token_ids) == 1
    llm.step()


def test_a_rank_that_hangs_is_given_up(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    num_rebuilds = llm.engine.stats().num_rank_rebuilds
    finish(llm, submit(llm))  # no first step any more, which may take long
    ids = submit(llm)
    for _ in range(4):
        llm.step()
    os.kill(executor(llm).rank_pids[1], signal.SIGSTOP)
    monkeypatch.setattr(executor(llm).deadline, "times", StepTimes(shortest_s=1.0))
    rebuild, was_away = executor(llm).rebuild, []

    def note_and_rebuild() -> None:
        was_away.append(llm.engine.executor.is_late())
        rebuild()

    monkeypatch.setattr(executor(llm), "rebuild", note_and_rebuild)
    llm.step()
    monkeypatch.undo()
    assert finish(llm, ids) == expected
    assert was_away == [True], "requests could leave for another engine before"
    assert not llm.engine.is_away
    assert llm.engine.stats().num_rank_rebuilds == num_rebuilds + 1


@pytest.mark.prove
def test_ranks_that_died_idle_are_rebuilt(llm: LLM, expected: list[Any]) -> None:
    """What is registered meanwhile is known to the new ones, as what was before."""
    for pid in executor(llm).rank_pids:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))
    llm.register_logits_processor("late", Only)
    processors = (LogitsProcessorSpec(name="late", arguments={"first": 9}),)
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=3, logits_processors=processors), use_tqdm=False)
    assert output.outputs[0].token_ids == [9, 10, 11]
    assert finish(llm, submit(llm)) == expected


@pytest.mark.parametrize(
    ("ranks", "num_rebuilds"),
    [([0, 1], 0), *(pytest.param([rank], 1, marks=pytest.mark.prove) for rank in (0, 1))],
)
def test_an_exception_on_ranks_costs_no_token(
    llm: LLM, expected: list[Any], ranks: list[int], num_rebuilds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all raise, their processes stay. Where one does, others wait for it in vain."""
    ranks_channel, before = executor(llm)._ranks, llm.engine.stats().num_rank_rebuilds
    send = ranks_channel.send
    ids = submit(llm)
    for _ in range(4):
        llm.step()

    def send_nonsense(message: Message, to: Iterable[int], owing: Iterable[int]) -> None:
        monkeypatch.undo()
        assert isinstance(message, Step)
        nonsense = Step(StepInput(message.step.step_id, scheduled=[ScheduledSequence(10**6, 0, 1, [])]), {})
        for rank in to:
            send(nonsense if rank in ranks else message, [rank], {rank} & set(owing))

    monkeypatch.setattr(ranks_channel, "send", send_nonsense)
    assert finish(llm, ids) == expected
    assert llm.engine.stats().num_rank_rebuilds == before + num_rebuilds


def test_unplaceable_ranks_are_explained_in_a_sentence(llm: LLM) -> None:
    words = (
        "2 ranks with 2 CPUs each find no place as STRICT_PACK: the cluster's nodes have 2, 1 CPUs, of which 1 are free"
    )
    with pytest.raises(CannotPlace, match=words):
        RankGroup(EngineConfig(model="none", num_threads=2, tensor_parallel_size=2), placement_s=1.0).start()


@pytest.mark.prove
def test_a_rank_that_hangs_while_it_loads_again_is_given_up(llm: LLM, tmp_path: pathlib.Path) -> None:
    """Its file answers no more, as on a network whose server is gone. The model comes back before the next attempt."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    times = ReloadTimes(factor=0.1, shortest_s=0.1)
    config = EngineConfig(model=str(folder), num_threads=1, kv_cache_bytes=1 << 22, device="cpu")
    group = RankGroup(config, times=times)
    info, channel = group.start()
    channel.close()
    file, content = folder / "config.json", (folder / "config.json").read_bytes()
    file.unlink()
    os.mkfifo(file)  # who opens it waits
    with pytest.raises(RankLost):
        group.start()
    file.unlink()
    file.write_bytes(content)
    group.times = ReloadTimes()
    again, channel = group.start()
    assert again.num_blocks == info.num_blocks
    channel.close()
    group.stop()


def test_model_errors_are_reported_as_without_ranks(llm: LLM, tmp_path: pathlib.Path) -> None:
    """The group of the engine at hand tries to load another model once a rank has died. An engine that cannot be
    rebuilt says so, and its ranks leave.
    """
    ranks = executor(llm)
    pids = ranks.rank_pids
    ranks._group._config = msgspec.structs.replace(ranks._group._config, model=str(tmp_path))
    ids = submit(llm)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"the ranks could not be rebuilt: ModelError: .*config\.json") as dead:
        finish(llm, ids)
    assert isinstance(dead.value.__cause__, ModelError), "raised as if it had been loaded here"
    assert not llm.engine.alive
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.prove
def test_an_adapter_that_is_replaced_in_its_folder_ends_an_engine_that_restarts_its_ranks(
    nodes: Any, made: Adapters, tmp_path: pathlib.Path
) -> None:
    """The requests of the engine name the values that it began with."""
    shutil.copytree(made.folders["first"], tmp_path / "adapter")
    llm = make_llm(tensor_parallel_size=2, placement_strategy="PACK", adapters={"fixed": str(tmp_path / "adapter")})
    (answer,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4), adapter="fixed")
    assert answer.outputs[0].token_ids == made.greedy(PROMPTS[0], "first", 4)
    shutil.copytree(made.folders["second"], tmp_path / "adapter", dirs_exist_ok=True)
    os.kill(executor(llm).rank_pids[1], signal.SIGKILL)
    with pytest.raises(EngineDead) as dead:
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4), adapter="fixed")
    assert isinstance(dead.value.__cause__, ModelError)


DRIVER = """
import sys, time
from manta.cluster.llm import LLM
from manta.cluster.engine.executors.thread_executor import ThreadExecutor
llm = LLM(sys.argv[1], kv_cache_bytes=1 << 24, num_threads=1, tensor_parallel_size=2)
print(*llm.engine.executor.rank_pids, flush=True)
if sys.argv[2] == "lives":
    sys.stdin.readline()
    del llm
    import gc
    gc.collect()
    print("done", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["dies", pytest.param("lives", marks=pytest.mark.prove)])
def test_no_rank_outlives_its_engine(nodes: Any, end: str) -> None:
    """Neither its process nor its claim, be the process of the engine killed or go on."""
    wait_until(lambda: ray.available_resources().get("CPU") == 3, poll_s=0.1)
    command = [sys.executable, "-c", DRIVER, str(checkpoint("llama")), end]
    environment = {**os.environ, "RAY_ADDRESS": nodes.address, "PYTHONPATH": ROOT}
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert driver.stdout is not None
        assert driver.stdin is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        wait_until(lambda: ray.available_resources().get("CPU") == 1, poll_s=0.1)  # Ray tells it a little later
        if end == "lives":
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "done\n"
        else:
            driver.kill()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        wait_until(lambda: ray.available_resources().get("CPU") == 3, poll_s=0.1)
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.prove
def test_a_killed_rank_of_a_recurrent_model_costs_no_token(nodes: Any) -> None:
    wait_until(lambda: ray.available_resources().get("CPU") == 3, poll_s=0.1)
    alone = make_llm("lfm2")
    expected = finish(alone, submit(alone))
    llm = make_llm("lfm2", tensor_parallel_size=2)
    for rank in (0, 1):
        ids = submit(llm)
        for _ in range(4):
            llm.step()
        os.kill(executor(llm).rank_pids[rank], signal.SIGKILL)
        assert finish(llm, ids) == expected
    assert llm.engine.stats().num_rank_disagreements == 0


@pytest.mark.prove
def test_ranks_of_a_lost_node_move_elsewhere(nodes: Any, expected: list[Any]) -> None:
    """The last test of these nodes, for one of them is no more."""
    wait_until(lambda: ray.available_resources().get("CPU") == 3, poll_s=0.1)
    llm = make_llm(tensor_parallel_size=2, placement_strategy="SPREAD")
    ids = submit(llm)
    for _ in range(4):
        llm.step()
    (second,) = nodes.worker_nodes
    nodes.remove_node(second)
    assert finish(llm, ids) == expected
    assert llm.engine.stats().num_rank_rebuilds == 1
