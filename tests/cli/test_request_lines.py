"""The console of `manta serve` shows the requests of its own ingresses, from files in a folder that servers share."""

from __future__ import annotations

import json
import pathlib

from manta.cluster.cli.request_lines import RequestLog


def entry(path: str) -> str:
    fields = {"time": "2026-01-01T12:00:00Z", "status": 200, "path": path, "seconds": 2.0}
    return json.dumps({**fields, "prompt_tokens": 1000, "output_tokens": 10}) + "\n"


def title(application: str) -> str:
    return f":job_id:01000000\n:actor_name:ServeReplica:{application}:ingress\n"


def test_requests_of_other_servers_are_left_out(tmp_path: pathlib.Path) -> None:
    """The logs of all servers of a Ray session lie in one folder. An earlier server had the same name."""
    earlier, idle = tmp_path / "worker-earlier.out", tmp_path / "worker-idle.out"
    earlier.write_text(title("manta") + entry("/earlier"))
    idle.write_text("")
    log = RequestLog(tmp_path, "manta")
    with earlier.open("a") as file:
        file.write(entry("/earlier/again"))
    idle.write_text(title("manta") + "no request\n" + entry("/own") + entry("/half")[:-10])
    (tmp_path / "worker-another.out").write_text(title("second") + entry("/second"))
    (tmp_path / "worker-later.out").write_text(title("manta") + entry("/own/too"))
    lines = log.news()
    assert [line.split("  ")[1:] for line in lines] == [
        ["200", "/own", "1,000 + 10 tokens in 2.00 s, 5 tokens/s"],
        ["200", "/own/too", "1,000 + 10 tokens in 2.00 s, 5 tokens/s"],
    ]
    with idle.open("a") as file:
        file.write(entry("/half")[-10:])
    assert [line.split("  ")[2] for line in log.news()] == ["/half"]
    assert log.news() == []
