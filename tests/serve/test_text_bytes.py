"""What tokenizers, compilers of constraints and grammar workers take beside the bounds that are counted for them. A
process of its own makes them for one vocabulary, and tells by how much its memory and that of its children grows.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks import checkpoints
from manta.cluster.config import EngineConfig
from manta.cluster.text_bytes import grammar_bytes, tokenizer_bytes
from manta.structured.pool_config import GRAMMAR_CACHE_BYTES, PoolConfig, PoolForm
from manta.workers.checkpoints.model_folder import resolve_model_folder

MEASURED = """
import gc, json, sys, time
import psutil
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.compiling.compiler import Compiler
from manta.structured.constraint import ConstraintLimits, ConstraintSpec
from manta.structured.grammar_pool.pool import GrammarPool
from manta.structured.pool_config import PoolConfig
from manta.structured.vocabulary import Vocabulary

folder, form = sys.argv[1:]

def taken():
    gc.collect()
    own = psutil.Process()
    return sum(each.memory_full_info().pss for each in (own, *own.children(recursive=True)))

start = taken()
tokenizer = Tokenizer(folder)
tokenizer.encode("a text " * 100)
with_tokenizer = taken()
vocabulary = Vocabulary.load(folder, tokenizer.vocab_size, (0,))
compiler = Compiler(vocabulary, ConstraintLimits())
for text in ('{"type": "object", "properties": {"a": {"type": "string"}}}', '{"type": "array"}'):
    compiler.resolve(ConstraintSpec(kind="json_schema", text=text)).result(120)
pool = GrammarPool(PoolConfig(), vocabulary, 8, form)
deadline = time.monotonic() + 120
while not all(worker.transport.is_ready() for worker in pool.workers.active) and time.monotonic() < deadline:
    time.sleep(0.1)
print(json.dumps([tokenizer.vocab_size, with_tokenizer - start, taken() - with_tokenizer]))
compiler.close()
pool.close()
"""


def test_the_bounds_count_workers_and_their_caches() -> None:
    threads, processes = (EngineConfig(grammar_pool=PoolConfig(form=form)) for form in ("threads", "processes"))
    assert grammar_bytes(EngineConfig(device="cpu"), 5000) == grammar_bytes(threads, 5000)
    assert grammar_bytes(EngineConfig(device="cuda"), 5000) == grammar_bytes(processes, 5000)
    one, three = (EngineConfig(grammar_pool=PoolConfig(form="threads", num_workers=number)) for number in (1, 3))
    each = (grammar_bytes(three, 0) - grammar_bytes(one, 0)) / 2
    assert GRAMMAR_CACHE_BYTES < each < 2 * GRAMMAR_CACHE_BYTES
    assert grammar_bytes(one, 200_000) - grammar_bytes(one, 100_000) > 100_000_000
    assert tokenizer_bytes(200_000) == 2 * tokenizer_bytes(100_000)


@pytest.mark.prove
@pytest.mark.parametrize("form", ["threads", "processes"])
@pytest.mark.parametrize("model", ["demo", "large"])
def test_no_process_takes_more_than_is_counted(model: str, form: PoolForm, tmp_path: pathlib.Path) -> None:
    if model == "large":
        checkpoints.make_tokenizer(151_665).save_pretrained(tmp_path)
    folder = str(resolve_model_folder("demo") if model == "demo" else tmp_path)
    done = subprocess.run([sys.executable, "-c", MEASURED, folder, form], capture_output=True, text=True, check=True)
    vocab_size, tokenizer, grammar = json.loads(done.stdout.splitlines()[-1])
    engine = EngineConfig(device="cpu", grammar_pool=PoolConfig(form=form))
    assert 0 < tokenizer <= tokenizer_bytes(vocab_size) + 2**20
    assert 0 < grammar <= grammar_bytes(engine, vocab_size)
