"""`manta serve model.gguf` over HTTP: the file's name is the model's, and its chat template and tokens are its own."""

from __future__ import annotations

import pathlib

import pytest

from tests.checkpoints import checkpoint, reference_greedy
from tests.gguf_files import dequantized, write_gguf
from tests.server import Server

PROMPT = [5, 6, 7, 90, 12]


@pytest.mark.prove
def test_a_gguf_file_is_served_by_its_path(tmp_path: pathlib.Path) -> None:
    original = checkpoint("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    path = write_gguf(original, tmp_path / "pens.gguf", lambda name: "Q6_K" if "ffn_down" in name else "Q4_K")
    expected = reference_greedy(dequantized(path, original, tmp_path / "dense"), PROMPT, 16)
    server = Server("engine.weights=dense", folder=path)
    try:
        body = {"model": "pens", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        status, _, answer = server.post("/v1/completions", body | {"return_token_ids": True})
        assert status == 200
        assert answer["choices"][0]["token_ids"] == expected
        messages = [{"role": "user", "content": "Hello"}]
        chat = {"model": "pens", "messages": messages, "max_tokens": 4}
        status, _, answer = server.post("/v1/chat/completions", chat)
        assert status == 200
        assert answer["model"] == "pens"
    finally:
        server.stop()
