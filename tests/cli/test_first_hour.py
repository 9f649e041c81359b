"""What a newcomer tries and gets wrong in the first hour, through the real command or a live server: the answer is a
sentence that says what is meant or what to do.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from benchmarks.processes import free_port
from manta.cluster.cli.__main__ import main
from manta.cluster.cli.request_lines import POLL_S
from manta.cluster.cli.serve import _has_chat, ready_message
from manta.cluster.config import EngineConfig, ServeConfig, load_config
from manta.cluster.llm import LLM
from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import checkpoint, make_tokenizer
from tests.patience import PATIENCE_S
from tests.server import shared_server

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, and standard error on one line; there is never a traceback."""
    try:
        code = main(list(arguments))
    except SystemExit as ended:  # argparse ends the process itself
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, " ".join(captured.err.split())


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "9000"], ["usage: manta serve", "--quiet", "there is no --prot (did you mean --port?)"]),
        (["serve", "--max-num-seq", "3"], ["there is no --max-num-seq (did you mean --max-num-seqs?)"]),
        (["chat", "--modle=x"], ["usage: manta chat", "--url", "there is no --modle (did you mean --model?)"]),
        (
            ["srve"],
            ["there is no command 'srve' (did you mean serve?)", "serve, chat, status, top, models, batch, check"],
        ),
        (["bench", "speculativ"], ["there is no part 'speculativ' (did you mean speculative?)"]),
        (["serve", "demo", "--model", "other"], ["two models, demo and --model other"]),
        (
            ["serve", "--set", "engine.dtype=float64"],
            ["`engine.dtype` cannot be 'float64'", "auto, bfloat16, float16, float32"],
        ),
        (["serve", "--set", "max_model_len=4096"], ["did you mean `engine.max_model_len`?"]),
        (["serve", "--set", "engine.kv_cache_bytes=1G"], ["512MiB (2^20) or 1GB (10^9)"]),
        (["serve", "--set", "engine.device=cuda"], ["device 'cuda' is not there: torch", "set device to cpu or auto"]),
        (["serve", "--set", "engine.dtype=float16"], ["demo cannot be served: ", "float16"]),
        (["serve", "--set", "engine.kv_cache_bytes=1000TB"], ["of memory is free; lower kv_cache_bytes"]),
        (["chat", "--url", "127.0.0.1:9"], ["no server answers at http://127.0.0.1:9", "serve'"]),
        (["chat", "--port", "9"], ["no server answers at http://127.0.0.1:9"]),
    ],
)
def test_command_line_typos_are_answered_with_a_suggestion(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "serve":
        arguments += ["--port", str(free_port())]
    code, _, error = run(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in error


def test_version_and_parts_of_bench_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert (code, re.fullmatch(r"manta \d\S*( \([0-9a-f]{12}(-dirty)?\))?\n", out) is not None) == (0, True)
    code, out, _ = run(capsys, "bench", "--help")
    assert code == 0
    for part in ("constraints", "faults", "forms", "kernel-times", "speculative", "same-tokens"):
        assert f"manta bench {part} " in out
    assert "--workloads" in out


def test_printed_commands_paste_with_and_without_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = ready_message(ServeConfig(port=8123))
    pasted = re.search(r"or in another terminal: (.+) chat --port 8123", message)
    assert pasted is not None
    assert pasted[1] != "manta"
    version = subprocess.run(f"{pasted[1]} --version", shell=True, executable="/bin/sh", capture_output=True, text=True)
    assert version.stdout.startswith("manta ")
    (tmp_path / "manta").symlink_to("/bin/true")
    assert "or in another terminal: manta chat --port 8123" in ready_message(ServeConfig(port=8123))


def test_make_names_its_variable_for_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))
        }
        # Nothing is installed: what says that it was is a file that is there.
        command = ["make", "serve", f"PORT={port}", f"BIN={pathlib.Path(sys.executable).parent}", "STAMP=Makefile"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    said = " ".join(done.stderr.split())
    assert f"port {port} on 127.0.0.1 is in use by another program" in said
    assert f"with PORT=: make serve PORT={port + 1}" in said


# ---- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine:\n  max_num_sequence: 3\n", ["did you mean `engine.max_num_sequences`?"]),
        ("model: demo\nengine: {model: other}\n", ["model is demo and engine.model other; give one"]),
        ("engine:\n  device: gpu\n", ["`engine.device` cannot be 'gpu'", "auto, cpu, cuda"]),
        ("engine: {speculative: {proposers: [ngrams]}}\n", ["proposers[0]", "forced, history, ngram, draft"]),
        ("engine: {colour: red}\n", ["the options of `engine` are model, "]),
        (
            (ROOT / "configs" / "serve" / "one-machine.yaml").read_text(),
            ["Ray Serve", "serve deploy", "under its args"],
        ),
    ],
)
def test_configuration_typos_are_answered_with_a_suggestion(
    text: str, words: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    code, _, error = run(capsys, "serve", "--config", str(path))
    assert code == 2
    assert str(path) in error
    for word in words:
        assert word in error


def test_a_configuration_may_name_the_model_on_top(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: mine\nport: 8001\n")
    assert load_config(path) == ServeConfig(engine=EngineConfig(model="mine"), port=8001)
    assert load_config(path, {"engine.model": "other"}).engine.model == "other"
    assert load_config(None, {"model": "mine"}).engine.model == "mine"


def test_broken_yaml_is_shown_with_line_and_mark(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("engine:\n  model: [demo\nport: 8000\n")
    assert main(["serve", "--config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "line 3, column 5" in " ".join(lines)
    assert lines[-2:] == ["  port: 8000", "      ^"]


@pytest.mark.parametrize(("size", "num_bytes"), [("512MiB", 2**29), ("1GB", 10**9), ("1.5 KiB", 1536), ("7B", 7)])
def test_bytes_may_have_a_unit(size: str, num_bytes: int) -> None:
    assert load_config(None, {"engine.kv_cache_bytes": size}).engine.kv_cache_bytes == num_bytes
    assert load_config(None, {"max_body_bytes": size}).max_body_bytes == num_bytes


def test_what_is_left_empty_means_its_default(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("engine:\nhost:\n")
    assert load_config(path) == ServeConfig()
    path.write_text("engine:\n  constraints:\n  speculative:\n")
    assert load_config(path, {"engine.block_size": 32}) == ServeConfig(engine=EngineConfig(block_size=32))


# ---- model folders -----------------------------------------------------------------------------------------------


def _gguf_file(at: pathlib.Path) -> pathlib.Path:
    (at / "model.gguf").write_bytes(b"GGUF")
    return at / "model.gguf"


def _gguf_folder_of_two(at: pathlib.Path) -> pathlib.Path:
    _gguf_file(at)
    (at / "other.gguf").write_bytes(b"GGUF")
    return at


def _gguf_folder(at: pathlib.Path) -> pathlib.Path:
    _gguf_file(at)
    return at


def _config_file(at: pathlib.Path) -> pathlib.Path:
    return checkpoint("llama") / "config.json"


def _lfs_pointer(at: pathlib.Path) -> pathlib.Path:
    folder = pathlib.Path(shutil.copytree(checkpoint("llama"), at / "lfs"))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 988097824\n"
    (folder / "model.safetensors").write_text(pointer)
    return folder


def _hub_cache(at: pathlib.Path) -> pathlib.Path:
    shutil.copytree(checkpoint("llama"), at / "models--a--b" / "snapshots" / "0123")
    return at / "models--a--b"


def _adapter(at: pathlib.Path) -> pathlib.Path:
    (at / "adapter_config.json").write_text('{"base_model_name_or_path": "meta/base"}')
    return at


def _pytorch(at: pathlib.Path) -> pathlib.Path:
    shutil.copy(checkpoint("llama") / "config.json", at)
    (at / "pytorch_model.bin").write_bytes(b"PK")
    return at


def _parent(at: pathlib.Path) -> pathlib.Path:
    shutil.copytree(checkpoint("llama"), at / "models" / "llama")
    return at / "models"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_gguf_file, ["model.gguf is no whole GGUF file", "copy or download it again"]),
        (_gguf_folder, ["model.gguf is no whole GGUF file", "copy or download it again"]),
        (_gguf_folder_of_two, ["holds no config.json but 2 GGUF models; give one of ", "model.gguf", "other.gguf"]),
        (_config_file, ["is one file of a model; give its folder, "]),
        (_lfs_pointer, ["model.safetensors is a Git LFS pointer", "run 'git lfs pull' in "]),
        (_hub_cache, ["is a folder of the hub's cache; give its snapshot, ", "snapshots/0123"]),
        (_adapter, ["is a LoRA adapter for meta/base", "--lora-modules"]),
        (_pytorch, ["weights in PyTorch's own format only", "safetensors"]),
        (_parent, ["1 of its folders do; give one, such as ", "models/llama"]),
    ],
)
def test_a_wrong_model_folder_is_described(
    make: Any, words: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make(tmp_path))
    for command, code in (["check", path], 1), (["serve", path, "--port", str(free_port())], 2):
        ended, _, error = run(capsys, *command)
        assert ended == code
        for word in words:
            assert word in error


def test_an_installation_without_the_demo_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr("manta.workers.checkpoints.model_folder._DEMO_FOLDER", tmp_path / "none")
    for command, code in (["check"], 1), (["serve", "--port", str(free_port())], 2):
        ended, _, error = run(capsys, *command)
        assert ended == code
        assert f"this installation lacks the demo model, which belongs into {tmp_path / 'none'}" in error


def _with_config(at: pathlib.Path, **values: object) -> str:
    folder = pathlib.Path(shutil.copytree(checkpoint("llama"), at / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return str(folder)


def test_no_quantisation_may_be_written_out(tmp_path: pathlib.Path) -> None:
    plain = load_model_config(checkpoint("llama"))
    for number, nothing in enumerate((None, {})):
        assert load_model_config(_with_config(tmp_path / str(number), quantization_config=nothing)) == plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", "4"),
        ("quantization_config", "fp8"),
        ("rope_parameters", [1]),
        ("head_dim", "sixteen"),
        ("architectures", 7),
        ("eos_token_id", {"a": [1]}),
    ],
)
def test_an_unexpected_value_is_named_with_its_file(
    key: str, value: object, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _with_config(tmp_path, **{key: value})
    code, _, error = run(capsys, "check", folder)
    assert code == 1
    assert "config.json: " in error
    assert key in error


def test_a_tokenizer_that_nobody_expected_is_one_sentence(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _with_config(tmp_path)
    path = pathlib.Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": {"first": {}}}))
    code, _, error = run(capsys, "check", folder)
    assert code == 1
    assert f"{path}: added_tokens_decoder.first must be under the id of a token" in error


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no such role') }}", "refuses a conversation of one message (no such role); mend it"),
        ("{% for x in %}", "is no valid Jinja: "),
    ],
)
def test_a_chat_template_that_always_fails_is_refused(
    template: str, words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _with_config(tmp_path)
    (pathlib.Path(folder) / "chat_template.jinja").write_text(template)
    for command, code in (["check", folder], 1), (["serve", folder, "--port", str(free_port())], 2):
        ended, _, error = run(capsys, *command)
        assert ended == code
        assert words in error


@pytest.mark.usefixtures("trials_here")
def test_a_template_for_content_parts_only_is_served(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _with_config(tmp_path)
    (pathlib.Path(folder) / "chat_template.jinja").write_text("{{ messages[0].content[0].text }}")
    assert run(capsys, "check", folder, "--set", "engine.kv_cache_bytes=1MiB")[0] == 0


def test_the_tokenizer_of_another_model_is_a_no(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path, 330)
    arguments = ["check", str(checkpoint("llama")), "--set", f"engine.tokenizer={tmp_path}"]
    code, _, error = run(capsys, *arguments)
    assert code == 1
    assert "has 330 tokens and the model's vocabulary 320, so it is another model's" in error


def test_what_transformers_says_at_length_is_one_sentence(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _with_config(tmp_path)
    for path in pathlib.Path(folder).glob("*token*"):
        path.unlink()
    code, _, error = run(capsys, "check", folder)
    assert (code, error.count(". ")) == (1, 0)
    assert f"{folder} holds no tokenizer.json; give the tokenizer's folder in the option `tokenizer`" in error
    (pathlib.Path(folder) / "tokenizer.model").write_bytes(b"no tokenizer")
    code, _, error = run(capsys, "check", folder)
    assert (code, error.count(". ")) == (1, 0)
    assert "transformers could not make one (" in error
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NovelLM"], "model_type": "novel"}))
    code, _, error = run(capsys, "check", str(tmp_path))
    assert (code, error.count(". ")) == (1, 0)
    assert "architecture NovelLM is not supported: transformers " in error
    assert "does not know it; a newer one may (pip install --upgrade transformers)" in error


@pytest.mark.usefixtures("trials_here")
def test_a_base_model_is_offered_for_completions(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pathlib.Path(_with_config(tmp_path, quantization_config=None))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    code, out, _ = run(capsys, "check", "--model", str(folder), "--set", "engine.kv_cache_bytes=1MiB")
    assert code == 0
    assert out.rstrip().endswith(f" serve {folder}")
    assert re.search(r"^no chat +.*/v1/completions only", out, re.MULTILINE)
    assert not _has_chat(EngineConfig(model=str(folder)))
    banner = ready_message(ServeConfig(), has_chat=False)
    assert "/v1/completions -H" in banner
    assert "client.completions.create(" in banner
    assert "chat/completions" not in banner


# ---- the API -----------------------------------------------------------------------------------------------------


def _get(path: str, accept: str = "*/*") -> tuple[int, str, str]:
    """Status, content type and body."""
    request = urllib.request.Request(shared_server().url + path, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read().decode()


def test_the_address_alone_says_what_is_served() -> None:
    server = shared_server()
    status, kind, body = _get("/")
    home = json.loads(body)
    assert (status, kind, home["model"]) == (200, "application/json", server.model)
    assert "POST /v1/chat/completions" in home["endpoints"]
    pasted = subprocess.run(["bash", "-c", home["example"] + " --silent"], capture_output=True, text=True, check=True)
    assert json.loads(pasted.stdout)["object"] in ("chat.completion", "text_completion")

    status, kind, page = _get("/", accept="text/html,application/xhtml+xml")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert '<script type="module"' in page
    for link in re.findall(r'href="([^"]+)"', page):
        assert _get(link)[0] == 200


def test_the_endpoints_can_be_read_in_a_browser() -> None:
    status, kind, page = _get("/docs", accept="text/html")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "POST /v1/chat/completions" in page
    assert "messages: list of ChatMessage (required)" in page


def test_an_unknown_endpoint_lists_the_served_ones() -> None:
    status, _, body = _get("/v1/images")
    message = json.loads(body)["error"]["message"]
    assert status == 404
    for served in ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"):
        assert served in message


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"prompt": "x"}, ["prompt", "/v1/completions", "a chat has messages"]),
        ("/v1/completions", {"messages": []}, ["messages", "/v1/chat/completions", "prompt"]),
        ("/v1/completions", {"prompt": "x", "max_token": 3}, ["did you mean max_tokens?"]),
    ],
)
def test_a_field_of_another_body_names_that_body(path: str, body: dict[str, Any], words: list[str]) -> None:
    server = shared_server()
    status, _, answer = server.post(path, {"model": server.model, **body})
    assert status == 400
    for word in words:
        assert word in answer["error"]["message"]


def test_quiet_omits_request_lines() -> None:
    """`tests/serve/test_serve_command.py` has one that is not quiet."""
    server = shared_server()
    server.post("/v1/completions", {"model": server.model, "prompt": "x", "max_tokens": 1})
    time.sleep(3 * POLL_S)
    assert "/v1/completions" not in server.printed.partition("Ctrl-C stops it.")[2]


# ---- import manta ------------------------------------------------------------------------------------------------


def test_the_package_has_the_names_of_the_product() -> None:
    import manta
    import manta.cluster.llm

    assert manta.LLM is LLM
    assert set(manta.__all__) == set(manta.cluster.llm.__all__)
    assert all(getattr(manta, name) is getattr(manta.cluster.llm, name) for name in manta.__all__)
