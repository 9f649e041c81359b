"""The console of `manta serve` shows the requests of its own ingresses, from files in a folder that servers share."""

from __future__ import annotations

import json
import pathlib

from manta.cluster.cli.request_lines import RequestLog
from manta.cluster.telemetry.request_log import log_folder


def entry(path: str) -> str:
    fields = {"time": "2026-01-01T12:00:00Z", "status": 200, "path": path, "seconds": 2.0}
    return json.dumps({**fields, "prompt_tokens": 1000, "output_tokens": 10}) + "\n"


def test_requests_of_other_servers_are_left_out(tmp_path: pathlib.Path) -> None:
    """The logs of all servers of a Ray session lie in one folder. An earlier server had the same name."""
    folder, second = log_folder(tmp_path, "manta"), log_folder(tmp_path, "second")
    folder.mkdir(parents=True)
    second.mkdir()
    earlier, idle = folder / "ingress-earlier.jsonl", folder / "ingress-idle.jsonl"
    earlier.write_text(entry("/earlier"))
    log = RequestLog(tmp_path, "manta")
    with earlier.open("a") as file:
        file.write(entry("/earlier/again"))
    idle.write_text("no request\n" + entry("/own/too") + entry("/half")[:-10])
    (second / "ingress-another.jsonl").write_text(entry("/second"))
    (folder / "engine-another.jsonl").write_text(entry("/of/an/engine"))
    (folder / "ingress-later.jsonl").write_text(entry("/own"))
    lines = log.news()
    assert [line.split("  ")[1:] for line in lines] == [
        ["200", "/own", "1,000 + 10 tokens in 2.00 s, 5 tokens/s"],
        ["200", "/own/too", "1,000 + 10 tokens in 2.00 s, 5 tokens/s"],
    ]
    with idle.open("a") as file:
        file.write(entry("/half")[-10:])
    assert [line.split("  ")[2] for line in log.news()] == ["/half"]
    assert log.news() == []


def test_a_rotated_file_is_read_to_its_end(tmp_path: pathlib.Path) -> None:
    folder = log_folder(tmp_path, "manta")
    folder.mkdir(parents=True)
    log, file = RequestLog(tmp_path, "manta"), folder / "ingress-one.jsonl"
    file.write_text(entry("/1"))
    assert [line.split("  ")[2] for line in log.news()] == ["/1"]
    with file.open("a") as opened:
        opened.write(entry("/2"))
    file.rename(folder / "ingress-one.jsonl.1")
    file.write_text(entry("/3"))
    assert [line.split("  ")[2] for line in log.news()] == ["/2", "/3"]
    assert log.news() == []
