"""Holds one engine in a process of its own and runs work upon a line of JSON on standard input.

Run by path, by the Python of the engine under test: Manta's, or the peer's, which has nothing of Manta. So it imports
only the standard library and the engine. `benchmarks/processes.py` starts it and is the other end of the pipe.
"""

import argparse
import ctypes
import json
import os
import sys
import threading
import time
import typing


class StepLog:
    """When each step's tokens arrived, and for how many sequences: what a step costs without a second, shorter run."""

    def __init__(self):
        self.restart()

    def restart(self):
        """Forgets the steps so far; returns the time that the next ones are counted from."""
        self.steps = []
        self.started = time.perf_counter()
        return self.started

    def watch(self, step, updates_of):
        """`step`, noting each return; `updates_of(its result)` are the sequences' updates."""

        def watched():
            result = step()
            rows = sum(1 for update in updates_of(result) if tokens_of(update))
            if rows:
                self.steps.append((time.perf_counter() - self.started, rows))
            return result

        return watched


def tokens_of(update):
    return update.token_ids if hasattr(update, "token_ids") else update.new_token_ids


def cached_tokens(output):
    """The tokens of a prompt that Manta's cache held; 0 for a peer, which says so otherwise or not at all."""
    return getattr(getattr(output, "usage", None), "num_cached_tokens", 0)


class MantaEngine:
    def __init__(self, options):
        from manta import LLM, SamplingParams

        self.make_params = SamplingParams
        self.llm = LLM(
            options["model"],
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            kv_cache_bytes=options["kv_cache_bytes"],
            max_num_sequences=options["max_num_sequences"],
            weights=options["weights"],
            exact=options["exact"],
        )
        self.steps = StepLog()
        self.llm.engine.step = self.steps.watch(self.llm.engine.step, lambda updates: updates)

    def generate(self, prompts, sampling):
        params = self.make_params(ignore_eos=True, **sampling)
        started = self.steps.restart()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, outputs

    def resident_kv_bytes(self):
        """The part of the KV pool that is backed by memory; pages that no sequence has touched take none."""
        cache = typing.cast(typing.Any, self.llm.engine.executor).worker.runner.kv_cache
        return resident_bytes(cache.data_ptr(), cache.nbytes)


class VllmEngine:
    """vLLM with its default settings; the pool's size comes from VLLM_CPU_KVCACHE_SPACE."""

    def __init__(self, options):
        from vllm import LLM, SamplingParams

        self.make_params = SamplingParams
        self.llm = LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_sequences"],
            disable_log_stats=True,
        )
        self.kv_cache_bytes = options["kv_cache_bytes"]
        self.steps = StepLog()
        core = self.llm.llm_engine.engine_core
        core.get_output = self.steps.watch(core.get_output, lambda answer: answer.outputs)

    def generate(self, prompts, sampling):
        params = self.make_params(ignore_eos=True, **sampling)
        wrapped = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = self.steps.restart()
        outputs = self.llm.generate(wrapped, params, use_tqdm=False)
        return time.perf_counter() - started, outputs

    def resident_kv_bytes(self):
        """The whole pool: the pool lies in another process, so the peer is given the benefit of the doubt."""
        return self.kv_cache_bytes


class LlamaCppEngine:
    """llama.cpp by the package xllamacpp, on a GGUF file; greedy, every request a thread of this process."""

    def __init__(self, options):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = options["model"]
        params.n_parallel = options["max_num_sequences"]
        params.n_ctx = options["max_num_sequences"] * options["max_model_len"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
        params.warmup = True
        self.server = xllamacpp.Server(params)
        self.steps = StepLog()

    def generate(self, prompts, sampling):
        outputs = [None] * len(prompts)
        common = {"n_predict": sampling["max_tokens"], "ignore_eos": True, "temperature": 0, "cache_prompt": False}

        def run(index):
            answer = self.server.handle_completions({"prompt": prompts[index], **common})
            answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
            outputs[index] = Choices([Choice([0] * answer["timings"]["predicted_n"])])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        started = self.steps.restart()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started, outputs


class Choice(typing.NamedTuple):
    token_ids: list


class Choices(typing.NamedTuple):
    outputs: list


ENGINES = {"manta": MantaEngine, "vllm": VllmEngine, "llamacpp": LlamaCppEngine}


def resident_bytes(address, size):
    """Bytes of `[address, address + size)` of this process that are backed by memory, as mincore(2) tells."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = address // page, -(-(address + size) // page)
    present = (ctypes.c_ubyte * (last - first))()
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if library.mincore(first * page, (last - first) * page, present) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(each & 1 for each in present) * page


def serve(engine, channel):
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "generate":
            seconds, outputs = engine.generate(message["prompts"], message["sampling"])
            num_tokens = sum(len(choice.token_ids) for out in outputs for choice in out.outputs)
            answer = {"seconds": seconds, "num_tokens": num_tokens, "steps": engine.steps.steps}
            answer["num_cached"] = sum(cached_tokens(out) for out in outputs)
        elif message["do"] == "resident_kv_bytes":
            answer = {"bytes": engine.resident_kv_bytes()}
        else:
            return
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    # What the engine prints goes to standard error, so that standard output carries answers only.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[arguments.engine](arguments.options)
    channel.write(json.dumps({"ready": True}) + "\n")
    channel.flush()
    serve(engine, channel)


if __name__ == "__main__":
    main()
