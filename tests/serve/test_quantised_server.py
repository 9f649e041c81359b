"""`manta serve` of a checkpoint of each method over HTTP: its tokens are those of transformers with the weights that
the checkpoint stands for.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.checkpoints import checkpoint, reference_greedy
from tests.gguf_files import dequantized, write_gguf
from tests.quantised_checkpoints import quantised_pair
from tests.server import Server
from tests.workers.test_quantised_formats import FORMATS

PROMPT = [5, 6, 7, 90, 12]
METHODS = ("gguf", "gptq", "awq", "fp8", "W4A16")


def pair(method: str, at: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A quantised checkpoint, and the one that it stands for."""
    original = checkpoint("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    if method != "gguf":
        return quantised_pair(original, at, *FORMATS[method][:2])
    path = write_gguf(original, at / "pens.gguf", lambda name: "Q6_K" if "ffn_down" in name else "Q4_K")
    return path, dequantized(path, original, at / "dense")


@pytest.mark.prove
@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_is_served_by_its_path(method: str, tmp_path: pathlib.Path) -> None:
    path, dense = pair(method, tmp_path)
    expected = reference_greedy(dense, PROMPT, 16)
    server = Server("engine.weights=dense", folder=path)
    try:
        body = {"model": path.stem, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        status, _, answer = server.post("/v1/completions", body | {"return_token_ids": True})
        assert status == 200
        assert answer["choices"][0]["token_ids"] == expected
        messages = [{"role": "user", "content": "Hello"}]
        chat = {"model": path.stem, "messages": messages, "max_tokens": 4}
        status, _, answer = server.post("/v1/chat/completions", chat)
        assert status == 200
        assert answer["model"] == path.stem
    finally:
        server.stop()
