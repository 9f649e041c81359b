"""The subcommands of `manta` and their flags. Each is parsed here and passed to one module of `cluster/cli/`.

Imports nothing heavy: the subcommand that needs torch or Ray loads it. `cluster/cli/__main__.py` is the only caller.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

import yaml

from manta.cluster.cli.flags import add_flags, given_options
from manta.cluster.cli.parser import CommandParser, VisibleParser, check_command
from manta.cluster.cli.refusal import Refusal
from manta.cluster.version import commit, version
from manta.structured.visible_text import say
from manta.workers.model_options import DEMO_MODEL

DEFAULT_URL = "http://127.0.0.1:8000"
MODEL_HELP = f"folder or hub id (default: the configuration's, else {DEMO_MODEL}, the model that Manta brings)"


def run(argv: list[str]) -> int:
    """Runs the subcommand of a command line and returns its exit code. Raises `Refusal`."""
    if argv[:1] == ["bench"]:  # the benchmarks have a command line of their own
        from manta.cluster.cli.bench import run_bench

        return run_bench(argv[1:])
    parser, commands = command_parser()
    check_command(argv, commands)
    options = parser.parse_args(argv)
    return int(options.run(options))


class _PrintVersion(argparse.Action):
    """Prints the version and ends the program. Only this asks git for the commit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        made_from = commit()
        say("manta {}{}", version(), f" ({made_from})" if made_from else "")
        parser.exit()


def command_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Returns the parser and the names of its subcommands."""
    parser = VisibleParser(prog="manta", description="Serves language models on a Ray cluster.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version, and the commit if known")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)

    serve = commands.add_parser("serve", help="serve a model, or several, over HTTP with OpenAI's API")
    several = "; several, or NAME=MODEL, are served under their names at one address"
    serve.add_argument("models", nargs="*", metavar="MODEL", help=f"{MODEL_HELP}{several}")
    serve.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same for one model")
    add_flags(serve)
    serve.add_argument("--quiet", action="store_true", help="print no line for each request")
    serve.add_argument("--name", help="name of the application on a Ray cluster (default: manta)")
    serve.add_argument("--replace", action="store_true", help="update the application of that name if it runs already")
    _add_config_flags(serve)
    serve.set_defaults(run=_serve)

    key = "If the server wants an API key, put it into MANTA_API_KEY."
    chat = commands.add_parser("chat", help="talk to a running server in the terminal", epilog=key)
    chat.add_argument("message", nargs="?", help="answer this and end (default: talk, or answer what is piped in)")
    _add_where(chat)
    chat.add_argument("--model", help="name as in /v1/models (default: the server's first)")
    chat.set_defaults(run=_chat)

    status = commands.add_parser("status", help="say what a running server's engines do, and what is starting")
    _add_where(status)
    status.add_argument("--json", action="store_true", dest="as_json", help="print the answer of /status as it is")
    status.set_defaults(run=_status)

    top = commands.add_parser("top", help="watch a running server's engines, queue and speed in the terminal")
    _add_where(top)
    top.add_argument("--interval", type=float, default=2.0, help="seconds between two frames (default: 2)")
    top.set_defaults(run=_top)

    _add_models(commands.add_parser("models", help="list, add, update and remove models of a running server"))

    batch = commands.add_parser("batch", help="answer the requests of a file in OpenAI's batch format")
    batch.add_argument("input", metavar="IN.jsonl", help="one request a line: custom_id, method, url, body")
    batch.add_argument("output", metavar="OUT.jsonl", help="one answer a line, in no order; answered lines are skipped")
    batch.add_argument("--model", help=MODEL_HELP)
    _add_config_flags(batch)
    batch.set_defaults(run=_batch)

    check = commands.add_parser("check", help="say whether a model and a configuration can be served here")
    _add_model(check)
    add_flags(check)
    _add_config_flags(check)
    check.set_defaults(run=_check)

    commands.add_parser("bench", help="measure speed, start-up and memory (manta bench --help)", add_help=False)
    return parser, list(commands.choices)


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Adds what `manta models` does, each a command of its own."""
    key = "Operators' keys are named in operator_keys. Put yours into MANTA_API_KEY."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandParser)
    listing = actions.add_parser("list", help="say which models there are, and how they fare")
    add = actions.add_parser("add", help="serve another model, from now on", epilog=key)
    add.add_argument("model", metavar="[NAME=]MODEL", help="its folder or GGUF file on the server, below model_roots")
    add.add_argument("--on-demand", action="store_true", help="load it when a request names it, and not now")
    update = actions.add_parser("update", help="change a model's options; its streams go on", epilog=key)
    remove = actions.add_parser("remove", help="serve a model no more; its requests end first", epilog=key)
    for action in (update, remove):
        action.add_argument("name", metavar="NAME", help="its name in /v1/models")
    for action in (add, update):
        _add_set_flag(action, "one option of its entry, for example engine.max_model_len=4096; may be repeated")
    for action in (listing, add, update, remove):
        _add_where(action)
        action.set_defaults(run=_models)


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default=DEFAULT_URL, help=f"where the server listens (default: {DEFAULT_URL})")
    where.add_argument("--port", type=int, help="its port, if it listens on this machine")


def _url(options: argparse.Namespace) -> str:
    return options.url if options.port is None else f"http://127.0.0.1:{options.port}"


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model as an argument and as a flag."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same")


def _model(options: argparse.Namespace) -> None:
    """Merges the argument and the flag of the model. Raises `Refusal` if they differ."""
    if options.model is not None and options.model_flag not in (None, options.model):
        raise Refusal(f"there are two models, {options.model} and --model {options.model_flag}; give one")
    options.model = options.model or options.model_flag


def _served_models(options: argparse.Namespace, has_folder: bool) -> dict[str, Any]:
    """Returns the options that the arguments of `manta serve` set: one model, or several, also if they stand beside
    those of a folder. Raises `Refusal`.
    """
    given = list(dict.fromkeys([*options.models, *filter(None, [options.model_flag])]))
    if options.model_flag is not None and len(given) > 1:
        others = ", ".join(options.models)
        raise Refusal(f"there are two models, {others} and --model {options.model_flag}; give one")
    entries = [_named_model(text) for text in given]
    if has_folder:
        return {"models": entries} if entries else {}
    if len(entries) == 1 and "name" in entries[0]:
        return {"engine.model": entries[0]["model"], "served_model_name": entries[0]["name"]}
    if len(entries) == 1:
        return {"engine.model": entries[0]["model"]}
    return {"models": entries} if entries else {}


def _named_model(text: str) -> dict[str, str]:
    """Returns an entry of `models` for MODEL or NAME=MODEL. A path that exists has no name in front."""
    name, separator, model = text.partition("=")
    if not separator or pathlib.Path(text).exists():
        return {"model": text}
    if not name or not model:
        raise Refusal(f"{text!r} is no NAME=MODEL; write for example qwen=~/models/Qwen2.5-0.5B-Instruct")
    return {"name": name, "model": str(pathlib.Path(model).expanduser()) if model.startswith("~") else model}


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="YAML file with the options of cluster/config.py")
    _add_set_flag(parser, "one option, for example engine.max_model_len=4096; may be repeated")


def _add_set_flag(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)


def _overrides(options: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """Returns dotted configuration keys from `--set`, and from `flags`, which take precedence."""
    overrides: dict[str, Any] = {}
    for item in options.overrides:
        key, separator, text = item.partition("=")
        if not separator or not key or key.startswith(".") or key.endswith(".") or ".." in key:
            raise Refusal(f"--set {item!r} is not KEY=VALUE; write for example --set engine.max_model_len=4096")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise Refusal(f"--set {item!r}: the value is not valid YAML: {error}") from error
    for flag, key in flags.items():
        value = getattr(options, flag)
        if value is not None:
            overrides[key] = value
    return overrides


def _serve(options: argparse.Namespace) -> int:
    from manta.cluster.cli.serve import run_serve

    flags = given_options(options)
    overrides = _overrides(options, {}) | flags | _served_models(options, "models_dir" in flags)
    return run_serve(options.config, overrides, options.quiet, options.name, options.replace)


def _chat(options: argparse.Namespace) -> int:
    from manta.cluster.cli.chat import run_chat

    return run_chat(_url(options), options.model, os.environ.get("MANTA_API_KEY"), options.message)


def _status(options: argparse.Namespace) -> int:
    from manta.cluster.cli.status import run_status

    return run_status(_url(options), options.as_json)


def _models(options: argparse.Namespace) -> int:
    from manta.cluster.cli.change_models import Models, nested

    models = Models(_url(options), os.environ.get("MANTA_API_KEY"))
    if options.action == "list":
        return models.show()
    if options.action == "remove":
        return models.remove(options.name)
    fields = nested(_overrides(options, {}))
    if options.action == "update":
        return models.update(options.name, fields)
    named = _named_model(options.model)
    engine = fields.get("engine") or {}
    if "model" in engine:
        raise Refusal(f"there are two models, {options.model} and --set engine.model={engine['model']}; give one")
    fields |= {"engine": engine | {"model": named["model"]}}
    if "name" in named:
        fields["name"] = named["name"]
    if options.on_demand:
        fields["on_demand"] = True
    return models.add(fields)


def _top(options: argparse.Namespace) -> int:
    from manta.cluster.cli.top import run_top

    return run_top(_url(options), options.interval)


def _batch(options: argparse.Namespace) -> int:
    from manta.cluster.cli.batch import run_batch

    return run_batch(options.input, options.output, options.config, _overrides(options, {"model": "engine.model"}))


def _check(options: argparse.Namespace) -> int:
    from manta.cluster.cli.check import run_check

    _model(options)
    overrides = _overrides(options, {"model": "engine.model"}) | given_options(options)
    return run_check(options.config, overrides)
