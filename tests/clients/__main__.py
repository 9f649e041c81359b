"""Programs of other people's against a server of a scripted model: `python -m tests.clients [NAME ...]`.

Each is run unchanged. Those of npm are installed by `npm install --prefix tests/clients`, those of pip are found on
PATH, and what is not installed is left out. A program passes if it printed what the model said, and if the file that
the model's call makes is there. Prints a row for each; the exit status is 1 if one failed.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from tests.scripted_model import Line, call, write_model
from tests.server import Server

HERE = pathlib.Path(__file__).parent
MODULES = HERE / "node_modules"
ASK = "Make the file."
ANSWERED = "The tool has answered."
SAID = "I say what I was told to say."
ASK_FOR_PATCH = "Please patch the file."
PATCH = "*** Begin Patch\n*** Update File: patched.txt\n@@\n-not yet\n+made\n*** End Patch\n"
LINES = (
    Line(call("apply_patch", input=PATCH), asked=ASK_FOR_PATCH, tool="apply_patch"),
    Line(call("exec_command", cmd="echo made > codex.txt"), tool="exec_command"),
    Line(call("run_shell_command", command="echo made > qwen.txt", is_background=False), tool="run_shell_command"),
    Line(call("bash", command="echo made > opencode.txt", description="Makes it"), tool="bash"),
    Line(call("Bash", command="echo made > continue.txt"), tool="Bash"),
    Line(call("book", city="Rome", days=2), tool="book"),
    Line("greeting.txt\n```\nhello world\n```\n", asked="Please greet the world."),
    Line(ANSWERED, answers_tool=True),
    Line(SAID),
)
SDKS = (
    "openai",
    "openai: responses",
    "anthropic",
    "ollama",
    "@ai-sdk/openai",
    "@ai-sdk/openai: chat",
    "@ai-sdk/openai-compatible",
    "@ai-sdk/anthropic",
    "ollama-ai-provider-v2",
)
"""The clients of `sdks.mjs`."""


class World(NamedTuple):
    """A running server, and the folder where a program works. Its home is another one, below it."""

    server: Server
    folder: pathlib.Path

    @property
    def v1(self) -> str:
        return f"{self.server.url}/v1"

    def run(self, *command: str, **environment: str) -> str:
        """Returns what a command prints. Raises `AssertionError` if it fails, or takes five minutes."""
        home = self.folder / ".home"
        home.mkdir(exist_ok=True)
        places = {"HOME": str(home), "PWD": str(self.folder)}  # opencode works where PWD says
        variables = {**os.environ, **places, "NO_PROXY": "127.0.0.1", **environment}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def made(self, name: str, printed: str) -> None:
        """Asserts that a call made the file of this name, and that the answer to its result was printed."""
        assert (self.folder / name).read_text() == "made\n", printed
        assert ANSWERED in printed, printed


Program = Callable[[World], None]


def bin_of(name: str) -> str | None:
    """Returns the path of a program that npm or pip installed, None if there is none."""
    path = MODULES / ".bin" / name
    return str(path) if path.exists() else shutil.which(name)


def codex(world: World, websockets: bool) -> None:
    """Lets it run a command."""
    printed = run_codex(world, ASK, websockets)
    world.made("codex.txt", printed)


def codex_patch(world: World, websockets: bool) -> None:
    """Lets it change a file by `apply_patch`, which it offers to models whose entry in its catalog says so."""
    (world.folder / "patched.txt").write_text("not yet\n")
    catalog = world.folder / "catalog.json"
    model = {"slug": world.server.model, "display_name": "Manta", "apply_patch_tool_type": "freeform"}
    model |= {"base_instructions": "You edit files.", "shell_type": "unified_exec", "priority": 1, "visibility": "list"}
    model |= {
        "supported_in_api": True,
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
    }
    model |= {"supported_reasoning_levels": [], "experimental_supported_tools": []}
    catalog.write_text(json.dumps({"models": [model]}))
    printed = run_codex(world, ASK_FOR_PATCH, websockets, f"model_catalog_json = {json.dumps(str(catalog))}\n")
    world.made("patched.txt", printed)


def run_codex(world: World, asked: str, websockets: bool, configured: str = "") -> str:
    """Returns what Codex prints when it is asked. `configured` are further lines of its configuration."""
    home = world.folder / ".codex"
    home.mkdir()
    provider = f'name = "manta"\nbase_url = "{world.v1}"\nwire_api = "responses"\n'
    provider += f"supports_websockets = {str(websockets).lower()}\n"
    chosen = f'model = "{world.server.model}"\nmodel_provider = "manta"\n'
    (home / "config.toml").write_text(f"{chosen}{configured}[model_providers.manta]\n{provider}")
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return world.run(str(bin_of("codex")), "exec", *options, asked, CODEX_HOME=str(home))


def qwen(world: World) -> None:
    given = {"OPENAI_BASE_URL": world.v1, "OPENAI_API_KEY": "none", "OPENAI_MODEL": world.server.model}
    options = ("--auth-type", "openai", "--yolo", "-p", ASK)
    world.made("qwen.txt", world.run(str(bin_of("qwen")), *options, **given))


def opencode(world: World) -> None:
    name = world.server.model
    model = {"name": name, "limit": {"context": 100_000, "output": 4000}}
    options = {"baseURL": world.v1, "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Manta", "options": options, "models": {name: model}}
    config = {"provider": {"manta": provider}, "permission": {"bash": "allow"}}
    (world.folder / "opencode.json").write_text(json.dumps(config))
    given = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    world.made("opencode.txt", world.run(str(bin_of("opencode")), "run", "-m", f"manta/{name}", ASK, **given))


def continue_cli(world: World) -> None:
    name = world.server.model
    model = {"name": name, "provider": "openai", "model": name, "apiBase": world.v1, "apiKey": "none"}
    model |= {"roles": ["chat"], "capabilities": ["tool_use"]}
    path = world.folder / "continue.yaml"  # JSON is YAML
    path.write_text(json.dumps({"name": "manta", "version": "0.0.1", "schema": "v1", "models": [model]}))
    world.made("continue.txt", world.run(str(bin_of("cn")), "--config", str(path), "--auto", "-p", ASK))


def aider(world: World) -> None:
    """Lets it edit a file and commit the edit."""
    greeting = world.folder / "greeting.txt"
    greeting.write_text("hello\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    world.run("git", "init", "-q")
    world.run("git", "add", greeting.name)
    world.run("git", *identity, "commit", "-qm", "First")
    given = {"OPENAI_API_BASE": world.v1, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    options = ("--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-gitignore")
    model = ("--model", f"openai/{world.server.model}", "--edit-format", "whole")
    printed = world.run(
        str(bin_of("aider")), *model, *options, "--message", "Please greet the world.", greeting.name, **given
    )
    assert greeting.read_text() == "hello world\n", printed
    assert world.run("git", "status", "--porcelain", greeting.name) == "", printed


def llm(world: World) -> None:
    model = {"model_id": "manta", "model_name": world.server.model, "api_base": world.v1, "api_key_name": "manta"}
    model |= {"supports_tools": True, "supports_schema": True}
    (world.folder / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    given = {"LLM_USER_PATH": str(world.folder)}
    asked = (str(bin_of("llm")), "-m", "manta", "--key", "none")
    for option in ((), ("--no-stream",)):
        assert world.run(*asked, *option, "What do you say?", **given) == f"{SAID}\n"
    schema = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
    schema["additionalProperties"] = False
    assert json.loads(world.run(*asked, "--schema", json.dumps(schema), "How many?", **given))["days"] in (1, 2)
    function = (
        "def book(city: str, days: int) -> str:\n    open('llm.txt', 'w').write('made\\n')\n    return 'booked'\n"
    )
    world.made("llm.txt", world.run(*asked, "--functions", function, "Please book a trip.", **given))


def guidellm(world: World) -> None:
    """Lets it measure three requests of synthetic text."""
    report = world.folder / "report.json"
    options = (
        f"--backend=kind=openai_http,target={world.server.url},model={world.server.model}",
        f"--tokenizer=kind=hf_auto,model={world.server.folder}",
        "--profile=kind=synchronous",
        "--constraint=kind=max_requests,count=3",
        "--data=kind=synthetic_text,prompt_tokens=20,output_tokens=4",
        f"--output=kind=json,path={report}",
    )
    world.run(str(bin_of("guidellm")), "run", *options)
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0), totals


def sdk(world: World, name: str) -> None:
    world.run("node", str(HERE / "sdks.mjs"), name, world.server.url, world.server.model)


PROGRAMS: dict[str, tuple[str, Program]] = {
    "codex": ("codex", functools.partial(codex, websockets=False)),
    "codex: WebSocket": ("codex", functools.partial(codex, websockets=True)),
    "codex: apply_patch": ("codex", functools.partial(codex_patch, websockets=False)),
    "codex: apply_patch, WebSocket": ("codex", functools.partial(codex_patch, websockets=True)),
    "qwen-code": ("qwen", qwen),
    "opencode": ("opencode", opencode),
    "continue": ("cn", continue_cli),
    "aider": ("aider", aider),
    "llm": ("llm", llm),
    "guidellm": ("guidellm", guidellm),
}
"""Maps a name to a program's file and to what is done with it."""


def installed() -> dict[str, Program]:
    found = {name: run for name, (program, run) in PROGRAMS.items() if bin_of(program)}
    if MODULES.is_dir():
        found |= {f"npm {name}": functools.partial(sdk, name=name) for name in SDKS}
    return found


def main(names: list[str]) -> int:
    programs = installed()
    unknown = sorted(set(names) - set(programs))
    if unknown:
        print(f"not installed, or unknown: {', '.join(unknown)}; there are {', '.join(programs)}")
        return 2
    failed = False
    with tempfile.TemporaryDirectory() as made:
        folder = write_model(pathlib.Path(made) / "scripted", LINES)
        server = Server("engine.kv_cache_bytes=67108864", folder=folder)
        try:
            for name in names or programs:
                world = World(server, pathlib.Path(tempfile.mkdtemp(dir=made)))
                try:
                    programs[name](world)
                    print(f"{name}: passed", flush=True)
                except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
                    failed = True
                    print(f"{name}: FAILED: {error}", flush=True)
        finally:
            server.stop()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
