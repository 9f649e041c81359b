"""`manta batch` with lines that name an adapter, over kills: every answer has the adapter's tokens."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.adapters import adapters_of
from tests.batch.test_batch import arguments, line, results, write_lines
from tests.checkpoints import checkpoint
from tests.patience import wait_until

pytestmark = pytest.mark.prove

PROMPT = [30 + 7 * place % 280 for place in range(40)]
NUM_LINES = 400
NUM_TOKENS = 20


def test_a_killed_batch_goes_on_with_its_adapters(tmp_path: pathlib.Path) -> None:
    adapters = adapters_of(checkpoint("llama"))
    folder = adapters.add("batch", 70, r=8)
    names = {"named": "batch", checkpoint("llama").name: ""}
    models = [*names] * (NUM_LINES // 2)
    lines = [
        line(number, model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        for number, model in enumerate(models)
    ]
    for each in lines:
        each["body"]["return_token_ids"] = True
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    setting = f"engine.adapters={json.dumps({'named': folder})}"
    command = [sys.executable, "-m", "manta.cluster.cli", *arguments(source, target, setting)]

    def num_written() -> int:
        return target.read_bytes().count(b"\n") if target.exists() else 0

    for part in (1, 2):
        process = subprocess.Popen(command)
        wait_until(lambda least=NUM_LINES * part // 3: num_written() >= least or process.poll() is not None)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert num_written() < NUM_LINES
    assert subprocess.run(command, check=False).returncode == 0
    found = {each["custom_id"]: each["response"]["body"] for each in results(target)}
    expected = {model: adapters.greedy(PROMPT, name, NUM_TOKENS) for model, name in names.items()}
    assert expected["named"] != expected[checkpoint("llama").name]
    assert [found[each["custom_id"]]["choices"][0]["token_ids"] for each in lines] == [expected[m] for m in models]
