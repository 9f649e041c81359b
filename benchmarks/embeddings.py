"""`manta bench embeddings`: texts a second beside sentence-transformers and llama.cpp, and how long a text waits.

All run in this process with the same threads, in turns, on the same random weights in float32. Their vectors are
compared first. The wait is that of requests of one short text, one after the other: alone, and beside requests of a
thousand.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.embedding_models import GGUF_FILE, MAX_TOKENS, SHAPES, embedding_checkpoint, random_texts
from benchmarks.processes import BenchmarkError
from benchmarks.report import in_turns, machine, markdown_head, markdown_row, ratio_of
from manta.cluster.config import EngineConfig
from manta.cluster.engine.pooling_engine import PoolingEngine
from manta.cluster.engine.pooling_queue import PoolingJob
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest
from manta.cluster.llm import LLM
from manta.structured.host import num_cores

LEAST_COSINE = 0.999
"""Cosine below which two engines do not compute the same vector, so that their speeds say nothing."""
SHORT_TOKENS = 16
"""Tokens of a text that waits."""
WAIT_S = 0.05
"""Longest wait of the engine's thread for texts, in seconds."""
PARALLEL = 8
"""Texts that llama.cpp computes at a time, each with room for the longest one."""

Embed = Callable[[list[str]], np.ndarray]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench embeddings", description=__doc__)
    parser.add_argument(
        "--shapes", default="minilm,bge-base", help=f"of {', '.join(SHAPES)} (default: minilm,bge-base)"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; empty for none")
    parser.add_argument("--parts", default="speed,wait", help="default: speed,wait")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", default="10,300", help="tokens of the shortest and the longest text")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--singles", type=int, default=200, help="short requests of a turn (default: 200)")
    parser.add_argument("--batch", type=int, default=1000, help="texts of a long request (default: 1000)")
    parser.add_argument("--threads", type=int, default=num_cores())
    options = parser.parse_args(arguments)
    print(machine(), file=sys.stderr)
    for part in options.parts.split(","):
        {"speed": _speeds, "wait": _waits}[part](options)
    return 0


def _lengths(options: argparse.Namespace, count: int) -> list[int]:
    """Returns the tokens of texts, spread evenly from the shortest to the longest."""
    shortest, longest = map(int, options.tokens.split(","))
    return [shortest + (longest - shortest) * index // max(1, count - 1) for index in range(count)]


# ---- texts a second --------------------------------------------------------------------------------------------------


def _speeds(options: argparse.Namespace) -> None:
    markdown_head("shape", "engine", "texts a second", "times slower than Manta (95%)")
    for shape in options.shapes.split(","):
        folder = embedding_checkpoint(shape)
        sides: dict[str, Embed] = {"manta": LLM(str(folder), dtype="float32", num_threads=options.threads).embed}
        for peer in filter(None, options.peers.split(",")):
            sides[peer] = PEERS[peer](folder, options.threads)
        texts = random_texts(shape, _lengths(options, options.texts))
        expected = sides["manta"](texts)
        for name, embed in sides.items():
            if (embed(texts) * expected).sum(1).min() < LEAST_COSINE:
                raise BenchmarkError(f"{name} computes other vectors of {shape}, so its speed says nothing")
        timed = {name: functools.partial(_texts_a_second, embed, texts) for name, embed in sides.items()}
        speeds = in_turns(timed, options.turns, f"{shape}, {len(texts)} texts")
        for name, values in speeds.items():
            ratio = "" if name == "manta" else ratio_of(speeds["manta"], values)
            markdown_row(shape, name, f"{statistics.median(values):.1f}", ratio)


def _texts_a_second(embed: Embed, texts: list[str], turn: int) -> float:
    began = time.perf_counter()
    embed(texts)
    return len(texts) / (time.perf_counter() - began)


def _sentence_transformers(folder: pathlib.Path, threads: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: np.asarray(model.encode(texts))


def _llama_cpp(folder: pathlib.Path, threads: int) -> Embed:
    """Runs llama.cpp by the package xllamacpp, with every text of a request in one batch."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / GGUF_FILE)
    params.embedding = True
    params.n_parallel = PARALLEL
    params.n_ctx = params.n_batch = params.n_ubatch = PARALLEL * MAX_TOKENS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def embed(texts: list[str]) -> np.ndarray:
        answer = server.handle_embeddings({"input": texts, "model": folder.name})
        found = json.loads(answer) if isinstance(answer, str | bytes) else answer
        return np.array([each["embedding"] for each in found["data"]], dtype=np.float32)

    return embed


PEERS: dict[str, Callable[[pathlib.Path, int], Embed]] = {
    "sentence-transformers": _sentence_transformers,
    "llama.cpp": _llama_cpp,
}


# ---- how long a text waits -------------------------------------------------------------------------------------------


def _waits(options: argparse.Namespace) -> None:
    markdown_head("shape", "beside", "p50 ms", "p99 ms", "p99 of that alone")
    for shape in options.shapes.split(","):
        config = EngineConfig(model=str(embedding_checkpoint(shape)), dtype="float32", num_threads=options.threads)
        engine = PoolingEngine(config)
        sides = {
            "nothing": functools.partial(_waiting, engine, options.singles, []),
            f"{options.batch} texts": functools.partial(
                _waiting, engine, options.singles, _lengths(options, options.batch)
            ),
        }
        found = in_turns(sides, max(1, options.turns // 5), f"{shape}, requests of one text")
        alone = 0.0
        for name, turns in found.items():
            seconds = sorted(each for turn in turns for each in turn)
            late = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
            alone = alone or late
            markdown_row(
                shape, name, f"{statistics.median(seconds) * 1e3:.2f}", f"{late * 1e3:.2f}", f"{late / alone:.2f}"
            )


def _waiting(engine: PoolingEngine, count: int, lengths: list[int], turn: int) -> list[float]:
    """Returns the seconds of each of `count` requests of one short text, beside requests of texts with `lengths`, of
    which there is always one until the last short request has ended.
    """
    ends = threading.Event()
    long = [PooledInput([index % 500 + 5 for index in range(length)], length) for length in lengths]
    short = PooledInput(list(range(5, 5 + SHORT_TOKENS)), SHORT_TOKENS)

    def ask(name: str, texts: list[PooledInput], on_end: Callable[[], object]) -> PoolingJob:
        request = PoolingRequest(request_id=name, texts=texts, client=name)
        return engine.add(request, lambda job, result: on_end())

    def run() -> None:
        while not ends.is_set():
            if not engine.step():
                engine.wait(WAIT_S)

    thread = threading.Thread(target=run)
    thread.start()
    jobs: list[PoolingJob] = []

    def ask_long() -> None:
        if long and not ends.is_set():
            jobs.append(ask("long", long, ask_long))

    seconds = []
    try:
        ask_long()
        for _ in range(count):
            done = threading.Event()
            began = time.perf_counter()
            ask("short", [short], done.set)
            done.wait()
            seconds.append(time.perf_counter() - began)
    finally:
        ends.set()
        thread.join()
        for job in jobs:
            engine.abort(job)
    return seconds
