"""Tokenizers that are kept: the same object for unchanged files, another one for changed ones, and a bound."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from manta.cluster.text.kept_tokenizers import TOKEN_BYTES, KeptTokenizers
from tests.checkpoints import checkpoint


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def test_files_that_were_changed_are_read_again(folder: pathlib.Path) -> None:
    """In place, too, with the same size and time of change as `os.utime` sets it."""
    kept = KeptTokenizers()
    first = kept.read(folder)
    assert kept.read(str(folder)) is first
    file = folder / "tokenizer.json"
    status, text = file.stat(), file.read_text()
    x, y = first.token_to_id("x"), first.token_to_id("y")
    changed = text.replace(f'"x": {x},', f'"x": {y},').replace(f'"y": {y},', f'"y": {x},')
    assert (changed != text, len(changed)) == (True, len(text))
    file.write_text(changed)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = kept.read(folder)
    assert (first.encode("x"), second.encode("x")) == ([x], [y])
    template = folder / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    third = kept.read(folder)
    assert third.render_chat_template([{"role": "user", "content": "so"}]) == "so"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert kept.read(folder).chat_template_source(tools=True) == "tools"


def test_those_that_were_used_longest_ago_leave(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folders = [folder, *(shutil.copytree(folder, tmp_path / name) for name in ("b", "c"))]
    kept = KeptTokenizers(max_bytes=5 * TOKEN_BYTES * KeptTokenizers().read(folder).vocab_size // 2)
    first, second = kept.read(folders[0]), kept.read(folders[1])
    assert kept.read(folders[0]) is first
    kept.read(folders[2])
    assert kept.read(folders[0]) is first
    assert kept.read(folders[1]) is not second
