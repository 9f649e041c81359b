"""How each command of the documents is run in the tests.

`COMMANDS` maps a command to the function that runs it. A command that would start a server or take minutes is run as
far as its flags reach; with `MANTA_PROVE=1` it runs further, with smaller arguments.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import NamedTuple

import httpx
import pytest
from ray._private.authentication import authentication_token_setup
from ray._raylet import AuthenticationMode  # type: ignore[attr-defined]
from ray.scripts import scripts as ray_commands
from ray.serve import scripts as serve_commands

from benchmarks import gpu_check, soak
from benchmarks.bench import ALL
from manta.cluster.batch.lines import parse
from manta.cluster.cli import batch, check, serve
from manta.cluster.cli.__main__ import main
from manta.cluster.cli.commands import command_parser
from manta.cluster.config import ServeConfig
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.clients.__main__ import PROGRAMS
from tests.fuzz.__main__ import main as fuzz
from tests.house.pages import ROOT, blocks
from tests.patience import PATIENCE_S
from tests.serve import deaths
from tests.server import Server
from tests.telemetry import live_alerts

PROVE = os.environ.get("MANTA_PROVE") == "1"

DEMO = resolve_model_folder("demo")
"""Stands for every model that the documents name."""

HUB_ID = "Qwen/Qwen2.5-0.5B-Instruct"


def bare(command: str) -> str:
    """Without the variables that it sets for itself."""
    return re.sub(r"^([A-Z_]+=\S+ )+", "", command)


class Manual(NamedTuple):
    """Where commands run: with the package of docs/extend.md installed, and models where the documents say."""

    home: pathlib.Path
    """The home folder, `~`."""
    package: pathlib.Path
    server: Callable[[], Server]
    """Started when it is first asked for."""

    def shell(self, command: str) -> str:
        """Returns what bash prints for a command. Fails if the command fails."""
        command = f"set -o pipefail; {command.replace('~/', f'{self.home}/')}"
        # Under `make test` a `make` would take that one's flags and variables, and tell which folder it is in.
        given = re.findall(r"(\w+)=", os.environ.get("MAKEFLAGS", ""))
        made = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", *given}
        environment = {name: value for name, value in os.environ.items() if name not in made}
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def manta(self, command: str) -> list[str]:
        """The arguments of `manta` that a command comes to; of `make` those in the last line of its recipe."""
        if command.startswith("make "):
            command = self.recipe(command)[-1].removeprefix("exec ").removeprefix(".venv/bin/")
        words = shlex.split(bare(command).replace("~/", f"{self.home}/"))
        assert words[0] == "manta"
        return words[1:]

    def recipe(self, command: str) -> list[str]:
        """Returns the lines that `make` would run, perhaps after an installation."""
        return self.shell(f"{command} --dry-run").strip().splitlines()

    def run(self, line: str) -> str:
        """A line of a recipe, in the environment of these tests."""
        return self.shell(line.replace(".venv/bin/", f"{pathlib.Path(sys.executable).parent}/"))


def write_package(folder: pathlib.Path) -> None:
    """The package of docs/extend.md as pip would install it."""
    metadata = ""
    for block in blocks("docs/extend.md"):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.language == "python" and name:
            (folder / name[1]).write_text(block.text)
        if block.language == "toml":
            metadata = block.text
    project = tomllib.loads(metadata)
    for module in project["tool"]["setuptools"]["py-modules"]:
        assert (folder / f"{module}.py").is_file()
    installed = folder / f"{project['project']['name'].replace('-', '_')}-{project['project']['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-manta\nVersion: 1.0\n")
    groups = project["project"]["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in each.items()) for group, each in groups]
    (installed / "entry_points.txt").write_text("\n".join(lines))


def asks_the_server(command: str, manual: Manual) -> None:
    """A `curl`; an answer that is an error fails."""
    address = f"127.0.0.1:{manual.server().port}"
    if "STREAM_ID" in command:
        command = command.replace("STREAM_ID", _stream_id(address))
    text = manual.shell(command.replace("localhost:8000", address))
    assert text
    assert '"error"' not in text


def _stream_id(address: str) -> str:
    """The id of a stream that can be resumed."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is Manta?"}], "stream": True}
    answer = httpx.post(
        f"http://{address}/v1/chat/completions", json=body, headers={"X-Resumable-S": "60"}, timeout=PATIENCE_S
    )
    return str(answer.headers["x-stream-id"])


def talks(command: str, manual: Manual) -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr("sys.stdin", io.StringIO("What is Manta?\n/exit\n"))
        words = manual.manta(command.replace("8000", str(manual.server().port)))
        assert main(words if "--port" in words else [*words, "--url", manual.server().url]) == 0
    assert printed.getvalue().strip()
    assert "Talking to demo" not in printed.getvalue(), "that is for a terminal"
    assert "the server answered" not in printed.getvalue()


def starts_a_server(command: str, manual: Manual) -> None:
    """As far as `manta serve` comes before it starts Ray: flags, configuration, the model's files and length."""
    configs: list[ServeConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_check_port", lambda host, port: None)  # somebody's own may be there
        for variable, value in re.findall(r"([A-Z_]+)=(\S+) ", command.removesuffix(bare(command))):
            patch.setenv(variable, value)
        patch.setattr(serve, "_serve_until_signal", lambda config, quiet, name, replace: configs.append(config))
        patch.setattr(
            check, "resolve_model_folder", lambda name: DEMO if name == HUB_ID else resolve_model_folder(name)
        )
        assert main(manual.manta(command)) == 0
    (config,) = configs
    assert config != ServeConfig() or "=" not in bare(command)


def answers_a_batch(command: str, manual: Manual) -> None:
    """As far as `manta batch` comes before it starts Ray, with the page's own lines, all of which are requests."""
    command = re.sub(r"^ray job submit .* -- ", "", command).replace("/shared/", "")
    (text,) = (block.text for block in blocks("docs/batch.md") if block.language == "json")
    lines = [parse(line) for line in text.encode().splitlines()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(manual.home)
        pathlib.Path("requests.jsonl").write_text(text)
        asked: list[int] = []
        patch.setattr(batch, "_run", lambda source, journal, config: asked.append(len(source.readlines())) or 0)
        assert main(manual.manta(command)) == 0
    assert asked == [len(lines)]


def starts_a_node(command: str, manual: Manual) -> None:
    """Its flags alone are tried here: `tests/engine/test_ray_executor.py` runs ranks on two nodes, and
    `tests/serve/test_joined_ray.py` joins a cluster.
    """
    words = shlex.split(command)
    assert words[:2] == ["ray", "start"]
    takes_its_flags(command, lambda rest: ray_commands.cli.main(["start", *rest], prog_name="ray"), words[2:])


def wants_a_token(command: str, manual: Manual) -> None:
    """Ray reads this variable and knows this value."""
    name, _, value = command.removeprefix("export ").partition("=")
    assert name == authentication_token_setup.AUTH_MODE_ENV_VAR
    assert hasattr(AuthenticationMode, value.upper())


def deploys(command: str, manual: Manual) -> None:
    """Its flags, and the files that it names; `tests/house/test_configs.py` reads these as Serve and Ray do."""
    program, name, *words = shlex.split(command)
    group = {"serve": serve_commands.cli, "ray": ray_commands.cli}[program]
    takes_its_flags(command, lambda rest: group.main([name, *rest], prog_name=program), words)
    names_files(command, manual)


def names_files(command: str, manual: Manual) -> None:
    """Checks a command of a program that the tests do not have: its files exist, and so do a build's arguments."""
    for name in re.findall(r"configs/[\w./-]+", command):
        assert (ROOT / name).exists(), f"{command}: there is no {name}"
    for name in re.findall(r"--build-arg (\w+)=", command):
        assert f"ARG {name}=" in (ROOT / "Dockerfile").read_text()


def names_extras(command: str, manual: Manual) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[([\w-]+)\]", command)) <= set(extras)


def checks_a_model(command: str, manual: Manual) -> None:
    assert main(manual.manta(command)) == 0


def is_named(command: str, manual: Manual) -> None:
    """Without a model of its own: there is such a command."""
    command_parser()[0].parse_args(manual.manta(command))


def is_helped(command: str, manual: Manual) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(manual.manta(command))
    assert "--max-model-len" in printed.getvalue()


def is_named_with_files(command: str, manual: Manual) -> None:
    command_parser()[0].parse_args([*manual.manta(command), "in", "out"])


def tells_its_version(command: str, manual: Manual) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(manual.manta(command))
    assert printed.getvalue().startswith("manta ")


def tells_its_status(command: str, manual: Manual) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*manual.manta(command), "--url", manual.server().url]) == 0
    if "--json" in command:
        (engine,) = json.loads(printed.getvalue())["engines"]
        assert engine["start_seconds"]["weights"] > 0
    else:
        assert "1 running" in printed.getvalue()


def draws_a_frame(command: str, manual: Manual) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*manual.manta(command), "--url", manual.server().url, "--interval", "0.2"]) == 0
    assert "tokens/s" in printed.getvalue()


def lists_its_models(command: str, manual: Manual) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*manual.manta(command), "--url", manual.server().url]) == 0
    assert "loaded" in printed.getvalue()


def changes_no_model(command: str, manual: Manual) -> None:
    """The server here has one model, and refuses."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        assert main([*manual.manta(command), "--url", manual.server().url]) == 2
    assert "--models-dir" in printed.getvalue()


def takes_its_flags(command: str, main: Callable[[list[str]], object], words: list[str]) -> None:
    """Whether `main` reads the words up to a `--help` at their end, which names every flag of the command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    for flag in re.findall(r"--[\w-]+", " ".join(words)):
        assert flag in printed.getvalue(), f"{command}: there is no {flag}"


def measures(command: str, manual: Manual) -> None:
    """Its flags only: figures take minutes."""
    takes_its_flags(command, main, manual.manta(command))
    for value in re.findall(r"--workloads ([\w,]+)", command):
        assert set(value.split(",")) <= set(ALL)


def measures_a_little(command: str, manual: Manual) -> None:
    measures(command, manual)
    if PROVE:
        assert "decode step" in manual.run(f"{manual.recipe(command)[-1]} --workloads g --repetitions 1")


def fuzzes(command: str, manual: Manual) -> None:
    """Its flags; in `make prove` two cases."""
    line = manual.recipe(command)[-1]

    def main(words: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["tests.fuzz", *words])
            fuzz()

    takes_its_flags(command, main, shlex.split(line.partition("-m tests.fuzz")[2]))
    if PROVE and "SEED" in command:
        assert "seeds from 1" in manual.run(f"{line} --count 2")


def judges_families(command: str, manual: Manual) -> None:
    """In `make prove` one model type, which is refused before a model is made."""
    line = manual.recipe(command)[-1]
    assert "-m tests.families" in line
    if PROVE:
        assert "xlnet: refused" in manual.run(f"{line} xlnet")


def installs_clients(command: str, manual: Manual) -> None:
    """The page has a row for each package, with its version."""
    folder = shlex.split(command)[-1]
    for name, version in json.loads((ROOT / folder / "package.json").read_text())["dependencies"].items():
        assert name == "zod" or f"{name} {version}" in (ROOT / "docs/clients.md").read_text(), name


def asks_clients(command: str, manual: Manual) -> None:
    """It knows their names."""
    names = shlex.split(command.partition("-m tests.clients")[2])
    assert set(names) <= set(PROGRAMS)


def runs_under_deaths(command: str, manual: Manual) -> None:
    """Its flags; `tests/serve/test_resume.py` does the same in `make prove`."""
    words = shlex.split(manual.recipe(command)[-1].partition("-m tests.serve.deaths")[2])
    takes_its_flags(command, deaths.main, words)


def raises_alerts(command: str, manual: Manual) -> None:
    """Its flags; `tests/telemetry/test_live_alerts.py` does the same in `make prove`."""
    words = shlex.split(manual.recipe(command)[-1].partition("-m tests.telemetry.live_alerts")[2])
    takes_its_flags(command, live_alerts.main, words)


def soaks(command: str, manual: Manual) -> None:
    """Its flags; `tests/house/test_soak.py` runs one in `make prove`."""
    words = shlex.split(manual.recipe(command)[-1].partition("-m benchmarks.soak")[2])

    def main(words: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["benchmarks.soak", *words])
            soak.main()

    takes_its_flags(command, main, words)


def runs_tests(command: str, manual: Manual) -> None:
    """Those that are named are run in `make prove`; all of them are what runs now."""
    line = manual.recipe(command)[-1]
    assert " -m pytest " in line
    assert ("MANTA_PROVE=1" in line) == (command == "make prove")
    assert all((ROOT / path).is_file() for path in re.findall(r"tests/\S+", line))
    if PROVE and "ARGS" in command:
        assert " passed" in manual.run(f"MANTA_PROVE=0 {line}")


def checks_a_gpu(command: str, manual: Manual) -> None:
    """Where there is none, as far as saying so."""
    line = manual.recipe(command)[-1]
    assert " -m benchmarks.gpu_check" in line
    takes_its_flags(command, gpu_check.main, line.split(" -m benchmarks.gpu_check")[1].split())


def lints(command: str, manual: Manual) -> None:
    """In `make prove`; otherwise what would."""
    lines = manual.recipe(command)[-3:]
    assert [line.split()[0] for line in lines] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
    for line in lines if PROVE else []:
        manual.run(line)


def builds_a_package(command: str, manual: Manual) -> None:
    """Its recipe builds, installs into an empty environment and looks there (tests/house/test_package.py)."""
    recipe = "\n".join(manual.recipe(command))
    interpreter = command.partition("PYTHON=")[2] or "python3"
    for step in (" -m build ", f"{interpreter} -m venv ", " -m pip ", " -m tests.installed "):
        assert step in recipe


def cleans(command: str, manual: Manual) -> None:
    """In a copy of the checkout."""
    copy = manual.package / "checkout"
    (copy / ".venv").mkdir(parents=True)
    (copy / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", ".ci/constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    manual.shell(f"cd '{copy}' && {command}")
    assert not (copy / ".venv").exists()


COMMANDS: dict[str, Callable[[str, Manual], None]] = {
    "make serve": starts_a_server,
    "make serve MODEL=~/models/Qwen2.5-0.5B-Instruct": starts_a_server,
    "make serve MODEL=Qwen/Qwen2.5-0.5B-Instruct": starts_a_server,
    "make serve PORT=8080 CONFIG=configs/engine.yaml": starts_a_server,
    "manta serve": starts_a_server,
    "manta serve demo qwen=~/models/Qwen2.5-0.5B-Instruct": starts_a_server,
    "manta serve --models-dir ~/models": starts_a_server,
    "manta serve demo --models-dir ~/models": starts_a_server,
    "manta serve --set engine.tensor_parallel_size=2": starts_a_server,
    "manta serve --set num_engine_replicas=2": starts_a_server,
    "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 manta serve --set engine.device=tpu "
    "--set engine.tensor_parallel_size=4": starts_a_server,
    (
        "RAY_ADDRESS=HEAD:6379 manta serve --set engine.tensor_parallel_size=2 "
        "--set engine.placement_strategy=STRICT_SPREAD"
    ): starts_a_server,
    "RAY_ADDRESS=HEAD:6379 manta serve --set host=0.0.0.0 --set num_engine_replicas=2": starts_a_server,
    "RAY_ADDRESS=HEAD:6379 manta serve demo": starts_a_server,
    "RAY_ADDRESS=HEAD:6379 manta serve ~/models/Qwen2.5-0.5B-Instruct --name qwen --port 8001": starts_a_server,
    "RAY_ADDRESS=HEAD:6379 manta serve demo --set engine.max_num_sequences=64 --replace": starts_a_server,
    "serve deploy configs/serve/two-models.yaml": deploys,
    "manta status --url http://localhost:8000/first": tells_its_status,
    "ray get-auth-token --generate": deploys,
    "export RAY_AUTH_MODE=token": wants_a_token,
    "ray start --head --port=6379": starts_a_node,
    "ray start --address=HEAD:6379": starts_a_node,
    "serve deploy configs/serve/multi-node.yaml": deploys,
    "serve status": deploys,
    "serve shutdown --yes": deploys,
    "ray up configs/cluster/aws.yaml": deploys,
    "ray rsync-up configs/cluster/aws.yaml configs/serve/replicas.yaml replicas.yaml": deploys,
    "ray exec configs/cluster/aws.yaml 'serve deploy replicas.yaml'": deploys,
    "ray attach configs/cluster/aws.yaml --port-forward 8000": deploys,
    "ray down configs/cluster/aws.yaml": deploys,
    "docker build --tag manta .": names_files,
    "docker run --shm-size 2g --publish 127.0.0.1:8000:8000 manta": names_files,
    "docker build --tag manta:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .": names_files,
    (
        "helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm "
        "--version 1.7.0"
    ): names_files,
    "kubectl create secret generic manta --from-literal=api-keys=NAME:KEY": names_files,
    "kubectl apply -k configs/kuberay/cpu": names_files,
    "kubectl apply -k configs/prometheus/operator": names_files,
    "promtool check rules configs/prometheus/rules.yml": names_files,
    "kubectl port-forward service/manta-serve-svc 8000": names_files,
    "prometheus --config.file=configs/grafana/prometheus.yml": names_files,
    (
        "docker run --network host --volume ./configs/grafana/provisioning:/etc/grafana/provisioning "
        "--volume ./configs/grafana/dashboards:/var/lib/grafana/dashboards grafana/grafana"
    ): names_files,
    "pip install --editable '.[otel]'": names_extras,
    "pip install --editable '.[kv-events]'": names_extras,
    "manta serve --set engine.kv_events.endpoint=tcp://*:5557 "
    "--set engine.kv_events.replay_endpoint=tcp://*:5657": starts_a_server,
    "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 OTEL_SERVICE_NAME=chat manta serve": starts_a_server,
    "manta serve demo --set engine.kv_cache_bytes=1GB": starts_a_server,
    "manta serve --set engine.max_num_sequences=64 --set port=8001": starts_a_server,
    "manta serve demo --set engine.weights=int8": starts_a_server,
    "manta serve demo --set engine.weights=lossless": starts_a_server,
    "manta serve demo --set engine.weights=int8 --set engine.exact=true": starts_a_server,
    "manta serve demo --generation-config none": starts_a_server,
    "manta serve demo --kv-cache-dtype int8": starts_a_server,
    "manta serve demo --kv-cache-dtype int4": starts_a_server,
    "manta serve --set engine.prefix_store_bytes=4GiB": starts_a_server,
    "manta serve --quiet": is_named,
    "manta serve demo --max-model-len 512": starts_a_server,
    "manta serve --help": is_helped,
    "manta serve --set batch_storage=~/batches": starts_a_server,
    "manta serve --set batch_storage=s3://bucket/batches": is_named,
    "manta bench batch": measures,
    "manta bench kernel-times --parts lossless": measures,
    "manta --version": tells_its_version,
    "manta serve --set 'engine.logits_processors={never-twice: null}'": starts_a_server,
    "manta serve --set 'engine.speculative={proposers: [prediction, forced, ngram]}'": starts_a_server,
    "manta serve --set 'engine.speculative={proposers: [prediction, forced, history, ngram]}'": is_named,
    "manta serve --set 'engine.speculative={proposers: [forced, ngram, draft], draft_model: configs/demo/draft}'": (
        starts_a_server
    ),
    "manta serve Qwen/Qwen3.5-4B --set 'engine.speculative={proposers: [forced, ngram, mtp]}'": is_named,
    "manta serve Qwen/Qwen3-8B --set 'engine.speculative={proposers: [forced, eagle3], draft_model: "
    "~/models/eagle3}'": is_named,
    "manta batch": is_named_with_files,
    "manta batch requests.jsonl answers.jsonl": answers_a_batch,
    "manta batch requests.jsonl answers.jsonl --set num_engine_replicas=2": answers_a_batch,
    "ray job submit --working-dir . -- manta batch requests.jsonl /shared/answers.jsonl --set num_engine_replicas=4": (
        answers_a_batch
    ),
    "manta check": is_named,
    "manta check --set engine.tensor_parallel_size=2": checks_a_model,
    "manta check ~/models/Qwen2.5-0.5B-Instruct": checks_a_model,
    "manta check ~/models/all-MiniLM-L6-v2": checks_a_model,
    "manta serve ~/models/all-MiniLM-L6-v2": starts_a_server,
    "manta serve ~/models/Qwen3-Reranker-0.6B": starts_a_server,
    "manta serve ~/models/Qwen2.5-0.5B-Instruct --task embed": starts_a_server,
    "manta check ~/models/qwen2.5-0.5b-instruct-q4_k_m.gguf": checks_a_model,
    "manta serve ~/models/qwen2.5-0.5b-instruct-q4_k_m.gguf": starts_a_server,
    "manta chat": talks,
    "manta chat --port 8000": talks,
    'manta chat "What is Manta?"': talks,
    "manta status": tells_its_status,
    "manta status --json": tells_its_status,
    "manta models list": lists_its_models,
    "manta models add qwen=Qwen2.5-0.5B-Instruct --set engine.max_model_len=4096": changes_no_model,
    "manta models update qwen --set 'aliases=[small]' --set engine.max_num_sequences=64": changes_no_model,
    "manta models remove qwen": changes_no_model,
    "manta top": draws_a_frame,
    "manta serve --set 'autoscaling={min_replicas: 1, max_replicas: 4}'": starts_a_server,
    "make bench": measures_a_little,
    'make bench ARGS="--workloads a,b,g --compare manta --peer-checkout PATH"': measures,
    'make bench ARGS="table --results FILE --llamacpp-python PATH"': measures,
    'make bench ARGS="constraints"': measures,
    'make bench ARGS="speculative"': measures,
    'make bench ARGS="forms --form avx2"': measures,
    "manta bench constraints": measures,
    "manta bench schemas --data PATH": measures,
    "manta bench faults": measures,
    "make test": runs_tests,
    'make test ARGS="tests/cli/test_cli.py -k check"': runs_tests,
    "make prove": runs_tests,
    "make lint": lints,
    "make gpu-check": checks_a_gpu,
    "make families": judges_families,
    "make fuzz": fuzzes,
    "make fuzz MINUTES=10 SEED=1": fuzzes,
    "make fuzz ARGS=--http": fuzzes,
    'make fuzz ARGS="--device tpu"': fuzzes,
    "make soak MINUTES=30": soaks,
    "make deaths MINUTES=20": runs_under_deaths,
    "make alerts": raises_alerts,
    "npm install --prefix tests/clients": installs_clients,
    ".venv/bin/python -m tests.clients codex opencode": asks_clients,
    "make package": builds_a_package,
    "make package PYTHON=python3.13": builds_a_package,
    "make clean": cleans,
}
"""How each command is run here. `curl` commands go to the server. A command that starts a server runs until Ray, and
one that takes minutes until its flags. With `MANTA_PROVE=1` (`make prove`) both run further, with smaller arguments.
"""
