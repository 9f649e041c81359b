"""The files of `manta batch`: an output changes only after all of it has proved to be this batch's, and an input is
read as it was meant or refused.
"""

from __future__ import annotations

import codecs
import os
import pathlib
import re
from collections.abc import Callable

import pytest

from manta.cluster.batch.journal import BatchRefused, Journal, read_lines
from manta.cluster.batch.lines import BatchResult, LineKey, encode
from manta.cluster.cli.__main__ import main

MAX_BYTES = 4096
INPUT = [b'{"custom_id": "%d", "url": "/v1/completions", "body": {}}' % number for number in range(12)]
OTHER = LineKey.of(3, b"a line of another input")


def key(number: int) -> LineKey:
    return LineKey.of(number, INPUT[number])


def result(number: int) -> bytes:
    return encode(BatchResult(key(number).id, f"{number}"))


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(INPUT))
    return path


def refusal_of(source: pathlib.Path, target: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what `manta batch` says when it refuses."""
    assert main(["batch", str(source), str(target)]) == 2
    return " ".join(capsys.readouterr().err.split())


def reopened(source: pathlib.Path, target: pathlib.Path) -> tuple[int, bytes]:
    """Returns the number of results that a journal finds, and the bytes that it leaves."""
    with source.open("rb") as lines, Journal(target, lines, MAX_BYTES) as journal:
        assert lines.tell() == 0
        return journal.num_done, target.read_bytes()


# ---- outputs that are not ours ---------------------------------------------------------------------------------------


FOREIGN = {
    "a note": b"remember the milk",
    "a note with a newline": b"remember the milk\n",
    "one-line JSON": b'{"name": "somebody else\'s"}',
    "one brace": b"{",
    "JSON whose id looks like ours": b'{"id":"batch_req_abc","custom_id":"1"}\n',
    "a torn line of OpenAI's own batch": b'{"id": "batch_req_1_0a0b0c0d", "custom_id": "1"',
    "CRLF": b'{"a": 1}\r\n{"b": 2}\r\n',
    "a result of another input": encode(BatchResult(OTHER.id, "3")),
    "a torn result of another input": encode(BatchResult(OTHER.id, "3"))[:-4],
    "a result behind the input's end": encode(BatchResult(LineKey(99, 1).id, "3")),
    "a result far behind the input's end": encode(BatchResult(LineKey(10**17, 1).id, "3")),
    "an id of 5,000 digits": b'{"id":"batch_req_%s_0a0b0c0d"}\n' % (b"9" * 5000),
    "a checksum of zero": b'{"id":"batch_req_0_00000000","custom_id":"1"}\n',
    "deep JSON": b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "bytes that are no text": bytes(range(256)) * 40,
    "zeros": bytes(4096),
    "ours, then a note": result(1) + b"remember the milk",
    "ours, then a note with a newline": result(1) + b"remember the milk\n",
    "ours, then a torn result of another input": result(1) + encode(BatchResult(OTHER.id, "3"))[:-4],
    "ours, then a torn line of another form": result(1) + result(2).replace(b":", b": ")[:-4],
}


@pytest.mark.few(8)
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_an_output_that_is_not_ours_is_refused_and_stays(
    content: bytes, source: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(content)
    made = target.stat()
    assert str(target) in refusal_of(source, target, capsys)
    assert target.read_bytes() == content
    assert target.stat().st_mtime_ns == made.st_mtime_ns


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "a symlink", "a hard link"])
@pytest.mark.parametrize(
    "content", [INPUT[0], b"\n".join(INPUT), b"", result(0)], ids=["a line", "12 lines", "empty", "ours"]
)
def test_an_output_that_is_the_input_is_refused(
    content: bytes,
    link: Callable[[pathlib.Path, pathlib.Path], None] | None,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = target = tmp_path / "in.jsonl"
    source.write_bytes(content)
    if link is not None:
        target = tmp_path / "out.jsonl"
        link(source, target)
    assert f"{target} is the input of the batch" in refusal_of(source, target, capsys)
    assert source.read_bytes() == content


@pytest.mark.parametrize("end", ["input", "output"])
def test_what_is_no_file_is_refused_without_waiting(
    end: str, source: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read, write = os.pipe()
    others = [pipe, tmp_path, pathlib.Path(f"/dev/fd/{write}"), pathlib.Path("/dev/null")]
    for other in others:
        files = (other, tmp_path / "out.jsonl") if end == "input" else (source, other)
        message = (
            f"cannot read {other}: it is no file" if end == "input" else f"{other} is a folder, a pipe or a device"
        )
        assert message in refusal_of(*files, capsys)
    os.close(read)
    os.close(write)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_in_a_folder_that_is_not_there_is_refused(
    source: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "nowhere" / "out.jsonl"
    assert f"cannot write {target}: No such file or directory" in refusal_of(source, target, capsys)


def test_an_output_that_another_batch_writes_is_refused(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out.jsonl"
    with source.open("rb") as lines, Journal(target, lines, MAX_BYTES) as journal:
        with pytest.raises(BatchRefused, match="another batch is writing"):
            Journal(target, lines, MAX_BYTES)
        journal.write(key(0), BatchResult(key(0).id, "0"))
    assert target.read_bytes() == result(0)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_output_that_vanishes_under_its_batch_ends_it(
    replaced: bool, source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "out.jsonl"
    with source.open("rb") as lines, Journal(target, lines, MAX_BYTES) as journal:
        journal.write(key(0), BatchResult(key(0).id, "0"))
        target.unlink()
        if replaced:
            target.write_text("somebody else's")
        with pytest.raises(BatchRefused, match=re.escape(f"{target} was removed or replaced")):
            journal.write(key(1), BatchResult(key(1).id, "1"))
        assert not journal.has(key(1))
    assert not replaced or target.read_text() == "somebody else's"


# ---- outputs that are ours -------------------------------------------------------------------------------------------


OURS = {
    "nothing": (b"", 0, b""),
    "two results": (result(0) + result(9), 2, b""),
    "results with CRLF": (result(0).replace(b"\n", b"\r\n") + result(9), 2, b""),
    "zeros after a result": (result(0), 1, bytes(512)),
    "a torn line and zeros after a result": (result(0), 1, result(9)[:20] + bytes(512)),
    "a torn line and zeros": (b"", 0, result(9)[:20] + bytes(512)),
    "a line without its newline": (b"", 0, result(9)[:-1]),
}


@pytest.mark.parametrize(("whole", "num_done", "torn"), OURS.values(), ids=OURS)
def test_an_output_of_ours_continues(
    whole: bytes, num_done: int, torn: bytes, source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(whole + torn)
    assert reopened(source, target) == (num_done, whole)


def test_a_line_torn_anywhere_is_removed_and_nothing_else(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out.jsonl"
    for whole in (b"", result(0), result(0) + result(11)):
        for cut in range(1, len(result(7))):
            target.write_bytes(whole + result(7)[:cut])
            if not whole and cut < len(b'{"id":"batch_req_'):  # this may be anybody's
                with pytest.raises(BatchRefused, match=re.escape(f"{target} holds something that is not")):
                    reopened(source, target)
                assert target.read_bytes() == result(7)[:cut]
            else:
                assert reopened(source, target) == (whole.count(b"\n"), whole)


def test_results_are_not_those_of_a_changed_line(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(result(0))
    source.write_bytes(b"changed\n" + b"\n".join(INPUT[1:]))
    with pytest.raises(BatchRefused, match="another input: its line 1 was different"):
        reopened(source, target)
    assert target.read_bytes() == result(0)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_a_byte_order_mark_costs_no_line(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    with source.open("rb") as lines:
        assert [line.text.strip() for line in read_lines(lines, MAX_BYTES) if line.text] == INPUT
    target = tmp_path / "out.jsonl"
    target.write_bytes(result(0))
    assert reopened(source, target) == (1, result(0))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_an_input_in_another_encoding_is_refused_by_name(
    encoding: str, source: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text(b"\n".join(INPUT).decode(), encoding=encoding)
    said = refusal_of(source, tmp_path / "out.jsonl", capsys)
    assert f"{source} is written in {encoding.upper()}; write it in UTF-8" in said
    assert not (tmp_path / "out.jsonl").exists()
