"""Holds one engine in a process of its own and runs work upon a line of JSON on standard input.

Run by path, by the Python of the engine under test: Manta's, or the peer's, which has nothing of Manta. So it imports
only the standard library and the engine. `benchmarks/processes.py` starts it and is the other end of the pipe.
`benchmarks/peers.py` says which engines there are, and how each is set.
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

    def add(self, rows):
        """Notes a step that has just ended and gave `rows` sequences a token."""
        self.steps.append((time.perf_counter() - self.started, rows))

    def watch(self, step, updates_of):
        """`step`, noting each return; `updates_of(its result)` are the sequences' updates."""

        def watched():
            result = step()
            rows = sum(1 for update in updates_of(result) if tokens_of(update))
            if rows:
                self.add(rows)
            return result

        return watched


def tokens_of(update):
    return update.token_ids if hasattr(update, "token_ids") else update.new_token_ids


def cached_tokens(output):
    """The tokens of a prompt that Manta's cache held; 0 for a peer, which says so otherwise or not at all."""
    return getattr(getattr(output, "usage", None), "num_cached_tokens", 0)


class MantaEngine:
    def __init__(self, options):
        from manta import LLM, ConstraintSpec, SamplingParams

        self.make_params, self.make_constraint = SamplingParams, ConstraintSpec
        self.llm = LLM(
            options["model"],
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            kv_cache_bytes=options["kv_cache_bytes"],
            max_num_sequences=options["max_num_sequences"],
            weights=options["weights"],
            exact=options["exact"],
            **({"adapters": options["adapters"]} if options["adapters"] else {}),
        )
        self.steps = StepLog()
        self.llm.engine.step = self.steps.watch(self.llm.engine.step, lambda updates: updates)

    def generate(self, prompts, max_tokens, sampling, schema, adapters):
        if schema is not None:
            constraint = self.make_constraint(kind="json_schema", text=json.dumps(schema), any_whitespace=False)
            sampling = {**sampling, "constraint": constraint}
        params = [self.make_params(ignore_eos=schema is None, max_tokens=each, **sampling) for each in max_tokens]
        named = {"adapter": adapters} if adapters else {}
        started = self.steps.restart()
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **named)
        return time.perf_counter() - started, outputs

    def resident_kv_bytes(self):
        """The part of the KV pool that is backed by memory; pages that no sequence has touched take none."""
        cache = typing.cast(typing.Any, self.llm.engine.executor).worker.runner.kv_cache
        return resident_bytes(cache.data_ptr(), cache.nbytes)


class VllmEngine:
    """vLLM with its default settings, and the faster of its engines for schemas. The pool's size comes from
    VLLM_CPU_KVCACHE_SPACE.
    """

    def __init__(self, options):
        from vllm import LLM, SamplingParams

        self.make_params = SamplingParams
        self.llm = LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_sequences"],
            structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
            disable_log_stats=True,
            **self._lora_options(options["adapters"]),
        )
        self.kv_cache_bytes = options["kv_cache_bytes"]
        self.steps = StepLog()
        core = self.llm.llm_engine.engine_core
        core.get_output = self.steps.watch(core.get_output, lambda answer: answer.outputs)

    def _lora_options(self, folders):
        """Room for all adapters in one batch, which switches vLLM's compilation off."""
        self.adapters = {}
        if not folders:
            return {}
        from vllm.lora.request import LoRARequest

        most_rank = 0
        for number, (name, folder) in enumerate(folders.items()):
            self.adapters[name] = LoRARequest(name, number + 1, folder)
            with open(os.path.join(folder, "adapter_config.json")) as file:
                most_rank = max(most_rank, json.load(file)["r"])
        return {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": most_rank}

    def generate(self, prompts, max_tokens, sampling, schema, adapters):
        if schema is not None:
            from vllm.sampling_params import StructuredOutputsParams

            sampling = {**sampling, "structured_outputs": StructuredOutputsParams(json=schema)}
        params = [self.make_params(ignore_eos=schema is None, max_tokens=each, **sampling) for each in max_tokens]
        wrapped = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = self.steps.restart()
        requests = [self.adapters.get(name) for name in adapters] or None
        outputs = self.llm.generate(wrapped, params, use_tqdm=False, lora_request=requests)
        return time.perf_counter() - started, outputs

    def resident_kv_bytes(self):
        """The whole pool: the pool lies in another process, so the peer is given the benefit of the doubt."""
        return self.kv_cache_bytes


class LlamaCppEngine:
    """llama.cpp's server by the package xllamacpp, on a GGUF file; every request is a thread of this process.

    With a `port`, it also answers HTTP there, as it always does on some port.
    """

    def __init__(self, options):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = options["model"]
        params.n_parallel = options["max_num_sequences"]
        params.n_ctx = options["max_num_sequences"] * options["max_model_len"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
        params.cache_ram_mib = 0  # else each new prompt copies its slot's old keys and values away
        params.warmup = True
        if options.get("port"):
            params.port = options["port"]
        self.server = xllamacpp.Server(params)
        self.steps = StepLog()

    def generate(self, prompts, max_tokens, sampling, schema, adapters):
        """The steps are those that the request that began last tells of: while it decodes, all others do."""
        outputs, told = [None] * len(prompts), []
        common = {"temperature": sampling["temperature"], "ignore_eos": schema is None, "n": sampling["n"]}
        if sampling["temperature"] > 0:
            common |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # drawn from the whole vocabulary, as by the others
        if schema is not None:
            common["json_schema"] = schema

        def run(index):
            body = {"prompt": prompts[index], "max_tokens": max_tokens[index], **common}
            answer = self.server.handle_completions(body)
            answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
            if "error" in answer:
                raise RuntimeError(f"llama.cpp: {answer['error']}")
            choice = Choice([0] * answer["usage"]["completion_tokens"])  # those of one choice
            outputs[index] = Choices([choice] * len(answer["choices"]))
            told.append(answer["timings"])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        started = self.steps.restart()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        if None in outputs:
            raise RuntimeError("llama.cpp answered with an error")
        decoded = [each for each in told if each["predicted_n"] > 1]
        if decoded:
            step = min(each["predicted_ms"] / (each["predicted_n"] - 1) for each in decoded) / 1e3
            self.steps.steps = [(step * number, len(prompts) * sampling["n"]) for number in range(min(max_tokens))]
        return seconds, outputs


BATCH_SIZE = 2048
"""Tokens of a batch for ik_llama.cpp and OpenVINO, which is llama.cpp's default."""


class IkLlamaCppEngine:
    """ik_llama.cpp by the C interface that the package ik-llama-cpp-python binds, on a GGUF file.

    Weights are repacked at load. The package has no scheduler and one sequence at a time, and looks at each logit in
    Python: so this is a greedy loop of its own, with all sequences in each batch. Flash attention aborts where one of
    several sequences sees none of a block of keys, so only a sequence that is alone has it.
    """

    def __init__(self, options):
        import ik_llama_cpp._ctypes_api as api
        import numpy

        self.api, self.numpy = api, numpy
        api.llama_backend_init()
        model = api.llama_model_default_params()
        model.repack_tensors, model.use_mmap = True, False
        self.model = api.llama_model_load_from_file(options["model"].encode(), model)
        if not self.model:
            raise RuntimeError(f"ik_llama.cpp does not load {options['model']}")
        rows, length = options["max_num_sequences"], options["max_model_len"]
        self.one = self._context(1, length)
        self.many = self._context(rows, length) if rows > 1 else self.one
        self.batch = api.llama_batch_init(BATCH_SIZE, 0, 1)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.steps = StepLog()

    def _context(self, rows, length):
        params = self.api.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = rows, rows * length, BATCH_SIZE
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.flash_attn = rows == 1
        context = self.api.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("ik_llama.cpp made no context")
        return context

    def generate(self, prompts, max_tokens, sampling, schema, adapters):
        if sampling["n"] > 1 or sampling["temperature"] > 0 or schema is not None:
            raise RuntimeError("the loop for ik_llama.cpp is greedy")
        started = self.steps.restart()
        context = self.one if len(prompts) == 1 else self.many
        self.api.llama_kv_cache_clear(context)
        chosen = [[] for _ in prompts]
        entries = [
            (row, position, token, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while entries:
            for begin in range(0, len(entries), BATCH_SIZE):
                self._decode(context, entries[begin : begin + BATCH_SIZE], chosen)
            entries = [
                (row, len(prompts[row]) + len(tokens) - 1, tokens[-1], True)
                for row, tokens in enumerate(chosen)
                if len(tokens) < max_tokens[row]
            ]
        return time.perf_counter() - started, [Choices([Choice(tokens)]) for tokens in chosen]

    def _decode(self, context, entries, chosen):
        """Computes entries of (row, position, token, whether its logits count), and adds the tokens of the largest."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (row, position, token, counts) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, counts
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        if self.api.llama_decode(context, batch) != 0:
            raise RuntimeError("ik_llama.cpp has no room for a batch")
        counted = [(index, row) for index, (row, _, _, counts) in enumerate(entries) if counts]
        for index, row in counted:
            logits = self.api.llama_get_logits_ith(context, index)
            chosen[row].append(int(self.numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))
        if counted:
            self.steps.add(len(counted))


class OpenVinoEngine:
    """OpenVINO GenAI's continuous batching on a model in its format, with a cache of known prefixes."""

    def __init__(self, options):
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.tensor, self.genai = numpy, openvino.Tensor, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, options["kv_cache_bytes"] >> 30)
        scheduler.max_num_seqs = options["max_num_sequences"]
        scheduler.max_num_batched_tokens = BATCH_SIZE
        scheduler.enable_prefix_caching = True
        threads = {"INFERENCE_NUM_THREADS": os.cpu_count(), "ENABLE_HYPER_THREADING": True}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", threads)
        self.steps = StepLog()
        self.num_requests = 0

    def generate(self, prompts, max_tokens, sampling, schema, adapters):
        configs = [self._config(each, sampling, schema) for each in max_tokens]
        tensors = [self.tensor(self.numpy.array([prompt], dtype=self.numpy.int64)) for prompt in prompts]
        started = self.steps.restart()
        handles = []
        for tensor, config in zip(tensors, configs, strict=True):
            self.num_requests += 1
            handles.append(self.pipeline.add_request(self.num_requests, tensor, config))
        chosen = [{} for _ in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            rows = 0
            for handle, tokens in zip(handles, chosen, strict=True):
                if handle.can_read():
                    for number, output in handle.read().items():
                        tokens.setdefault(number, []).extend(output.generated_ids)
                        rows += 1
            # The choices of one prompt are told at its end, but gain a token each in every step
            rows = sampling["n"] if sampling["n"] > 1 and len(prompts) == 1 else rows
            if rows:
                self.steps.add(rows)
        seconds = time.perf_counter() - started
        return seconds, [Choices([Choice(each) for each in tokens.values()]) for tokens in chosen]

    def _config(self, max_tokens, sampling, schema):
        config = self.pipeline.get_config()
        config.max_new_tokens, config.ignore_eos = max_tokens, schema is None
        config.apply_chat_template = False
        config.num_return_sequences = sampling["n"]
        if sampling["temperature"] > 0:
            config.do_sample, config.temperature, config.top_p = True, sampling["temperature"], 1.0
        if schema is not None:
            config.structured_output_config = self.genai.StructuredOutputConfig(json_schema=json.dumps(schema))
        return config


class Choice(typing.NamedTuple):
    token_ids: list


class Choices(typing.NamedTuple):
    outputs: list


ENGINES = {
    "manta": MantaEngine,
    "vllm": VllmEngine,
    "llamacpp": LlamaCppEngine,
    "ik_llamacpp": IkLlamaCppEngine,
    "openvino": OpenVinoEngine,
}


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
            work = (message[name] for name in ("prompts", "max_tokens", "sampling", "schema", "adapters"))
            seconds, outputs = engine.generate(*work)
            lengths = [len(choice.token_ids) for out in outputs for choice in out.outputs]
            answer = {"seconds": seconds, "lengths": lengths, "steps": engine.steps.steps}
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
    if "port" in arguments.options:
        threading.Event().wait()  # it serves until it is terminated
    serve(engine, channel)


if __name__ == "__main__":
    main()
