"""README, CONTRIBUTING and the manual: what they link to is there, and what they tell people to run runs.

Python of a page runs in its order. Each command line, in a block or in a sentence, has a row in `COMMANDS` of
`tests/house/page_commands.py`. A command without a row fails, and a row without a command too. Pages share one server.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator

import msgspec
import pytest
import yaml

from manta.cluster.cli import chat, serve
from manta.cluster.config import ServeConfig
from tests.bare_names import ROOMS
from tests.gguf_files import write_gguf
from tests.house.page_commands import COMMANDS, DEMO, Manual, asks_the_server, write_package
from tests.house.pages import PAGES, ROOT, blocks, commands, prose
from tests.pooled_checkpoints import embedder, generator
from tests.server import Server

MAX_LINES = {"README.md": 150, "CONTRIBUTING.md": 70}

PRINTS = {
    "README.md": [],
    "docs/first-five-minutes.md": [],
    "docs/api.md": ["Manta serves"],
    "docs/serve.md": [],
    "docs/offline.md": ["0 ", "1 ", "2 ", "Manta serves"],
    "docs/models.md": [],
    "docs/clusters.md": [],
    "docs/operate.md": [],
    "docs/runbook.md": [],
    "docs/batch.md": ["Manta serves"],
    "docs/deploy.md": [],
    "docs/constrain.md": ["customer='Paul Stein' city='Rome'", "minutes=20", 'set_timer {"minutes": 20}'],
    "docs/speculate.md": ["Manta serves"],
    "docs/extend.md": [],
    "docs/security.md": [],
    "docs/options.md": [],
    "docs/metrics.md": [],
    "docs/errors.md": [],
    "docs/flags.md": [],
    "docs/design.md": [],
    "docs/clients.md": [],
}
"""Texts that a page's Python prints. A `text` block is all that the Python before it prints."""

DEEDS = {"read", "change", "stop"}
"""What a threat may be to the server: docs/security.md says of everybody what prevents each."""

ALL_COMMANDS = sorted({command for page in PAGES for command in commands(page)})


# ---- what is linked to -----------------------------------------------------------------------------------------------


def anchors(path: pathlib.Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Targets of links, written in place or below the text; a name of the latter without a target fails."""
    text = prose(page)
    targets = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    text = re.sub(r"`[^`\n]*`", "", text)  # code may have brackets too
    names = re.findall(r"\]\[([^\]]+)\]", text)
    assert set(names) == set(targets), f"{page}: links {sorted(names)}, and targets of {sorted(targets)}"
    return [*re.findall(r"\]\(([^)\s]+)\)", prose(page)), *targets.values()]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    found = [link for link in links(page) if not link.startswith("https://")]
    assert found
    for link in found:
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}; there is {sorted(anchors(target))}"


def test_each_threat_names_its_tests_or_is_open() -> None:
    page = (ROOT / "docs/security.md").read_text()
    threats = page.partition("\n## The threat model\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(threats) >= 8
    for threat in threats:
        who, *points = re.split(r"\n+- (?=\*\*)", threat)
        assert {deed.lower() for each in points for deed in re.findall(r"\*\*(\w+)\*\*", each)} >= DEEDS, who
        bare = [each for each in points if not re.search(r"\]\[[a-z]+\]|\*\*open\*\*", each, re.IGNORECASE)]
        assert not bare or who == "The operator", f"{who}: {bare}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    """In code, with a slash or the ending of a source file; NAME is the reader's."""
    rooms = ("benchmarks/", "cluster/", "configs/", "docs/", "specdecode/", "structured/", "tests/", "workers/")
    for name in re.findall(r"`([\w./]+(?:/|\.py|\.cpp|\.md|\.yaml|\.toml))`", prose(page)):
        if "NAME" in name or name.startswith(("/", ".")):
            continue
        places = [ROOT / name, ROOT / "tests" / name, ROOT / "cluster" / name]
        assert any(path.exists() for path in places[: 1 if name.startswith(rooms) else 3]), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_page_names_are_there(page: str) -> None:
    """Those that `python -m` runs, and those of Manta's rooms, with an attribute after a colon."""
    text = (ROOT / page).read_text()
    names = set(re.findall(r"python3? -m ([\w.]+)", text))
    names |= set(re.findall(rf"\bmanta\.(?:{'|'.join(ROOMS)})\b(?:\.[a-z_]+)*(?::\w+)?", text))
    for name in names:
        module, _, attribute = name.partition(":")
        assert importlib.util.find_spec(module), f"{page} names {module}"
        assert not attribute or hasattr(importlib.import_module(module), attribute), f"{page} names {name}"


def test_the_recording_shows_what_is_printed_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "program", lambda: ".venv/bin/manta")
    recorded = (ROOT / "docs" / "first-five-minutes.md").read_text()
    assert serve.ready_message(ServeConfig()).strip("\n") in recorded
    assert chat.HELP in recorded


def test_every_page_shows_its_pythons_output() -> None:
    assert set(PRINTS) == set(PAGES) - {"CONTRIBUTING.md"}


@pytest.mark.parametrize("page", MAX_LINES)
def test_a_page_stays_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= MAX_LINES[page]


def test_the_manual_shows_what_serve_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "program", lambda: "manta")
    shown = [block.text for block in blocks("docs/serve.md") if not block.language]
    assert shown == [serve.ready_message(ServeConfig()).lstrip("\n")]


# ---- what is run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manual]:
    home, package = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("package")
    (home / "models").mkdir()
    (home / "models" / "Qwen2.5-0.5B-Instruct").symlink_to(DEMO)
    (home / "models" / "all-MiniLM-L6-v2").symlink_to(embedder("bert_mean"))
    (home / "models" / "Qwen3-Reranker-0.6B").symlink_to(generator("text-ranking"))
    write_gguf(DEMO, home / "models" / "qwen2.5-0.5b-instruct-q4_k_m.gguf", lambda name: "Q4_0")
    write_package(package)
    started: list[Server] = []

    def server() -> Server:
        if not started:
            options = (
                "engine.speculative={proposers: [forced, ngram]}",
                "engine.logits_processors={never-twice: null}",
                f"batch_storage={home}/batches",
                "engine.max_model_len=512",  # some answers of the pages end there
            )
            started.append(Server("served_model_name=demo", *options, folder=DEMO))
        return started[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
        patch.syspath_prepend(package)
        patch.chdir(ROOT)
        yield Manual(home, package, server)
    for each in started:
        each.stop()


@pytest.mark.usefixtures("trials_here")
@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_a_command_of_the_documents_runs(command: str, manual: Manual) -> None:
    run = asks_the_server if command.startswith("curl ") else COMMANDS.get(command)
    assert run is not None, f"{command} stands in a document; say in COMMANDS of page_commands.py how it is run here"
    run(command, manual)


def test_each_row_of_the_table_is_documented() -> None:
    assert set(COMMANDS) <= set(ALL_COMMANDS)


@pytest.mark.parametrize("page", PRINTS)
def test_the_python_of_a_page_runs(page: str, manual: Manual, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    printed, last = "", ""
    for block in blocks(page):
        if block.language == "text":
            assert last == block.text, f"{page} line {block.line}: the block before prints something else"
        if block.language != "python":
            continue
        text = block.text
        if "localhost:8000" in text:
            text = text.replace("localhost:8000", f"127.0.0.1:{manual.server().port}")
        exec(compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec", dont_inherit=True), names)
        last = capsys.readouterr().out
        printed += last
    for text in PRINTS[page]:
        assert text in printed


def test_a_configuration_on_a_page_is_one() -> None:
    found = [block.text for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert found
    for text in found:
        assert msgspec.convert(yaml.safe_load(text), ServeConfig) != ServeConfig()


def test_every_block_has_a_known_kind() -> None:
    found = {block.language for page in PAGES for block in blocks(page)}
    assert found == {"", "bash", "console", "json", "python", "text", "toml", "yaml"}
