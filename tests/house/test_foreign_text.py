"""Foreign text gets to a terminal or a log through `structured/visible_text.py` and `visible_logs.py` only."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest

from tests.house.syntax_trees import ROOMS, modules, nodes

SINKS = ("manta.structured.visible_text", "manta.structured.visible_logs")
"""Modules that print and log; `tests/house` has the bytes in `tests/cli/test_hostile_text.py`."""

OWN = "it prints nothing but literals and numbers of Manta's"
READ = "a program reads it, not a person"
PASSES = {
    ("manta.cluster.cli.chat", "_switch"): OWN,
    ("manta.cluster.cli.interruption", "_say"): OWN,
    ("manta.cluster.cli.batch", "Counter.__init__"): OWN,
    ("manta.cluster.llm", "LLM._run_until_finished"): OWN,
    ("manta.workers.jax_worker.programs", "ProgramCompiler.compile"): OWN,
    ("manta.workers.torch_worker.trial", ""): READ,
    ("manta.cluster.text.tokenizer_trial", "main"): READ,
    ("manta.cluster.hub_pull", "main.tell"): READ,
    ("manta.cluster.telemetry.request_log", ""): "the request log is JSON, which escapes; `_write` bounds its texts",
    ("manta.cluster.telemetry.request_log", "_write"): "as above",
    ("manta.cluster.telemetry.request_log", "keep_request_log"): "as above",
    ("manta.cluster.telemetry.request_log", "open_request_log"): "as above",
    ("manta.cluster.telemetry.request_log", "_open"): "as above",
    ("manta.cluster.cli.top", ""): "every text of a frame is made visible in `read_status`, `frame` or `_table`",
    ("manta.cluster.serve.app", "_connect"): "it sets the level of Serve's logger",
    ("manta.cluster.serve.listening.listener", "Listener.ensure_listening"): "it sets the level of uvicorn's logger",
    ("manta.cluster.cli.parser", "VisibleParser.error"): "argparse prints the usage, which is Manta's",
}
"""Functions, by module, that may go round the sinks, and why."""

PRINTERS = {"print", "tqdm", "pprint", "breakpoint"}
"""Functions that print."""
MODULES = {"logging", "warnings", "traceback", "click", "rich", "faulthandler", "getpass", "curses", "cmd"}
"""Modules by which text gets to a terminal or a log."""
HARMLESS = {
    "logging": {"Logger", "LogRecord", "INFO", "WARNING", "ERROR", "CRITICAL", "DEBUG"},
    "traceback": {"extract_tb", "format_exception", "format_exception_only"},
    "warnings": {"catch_warnings", "simplefilter", "filterwarnings"},
    "rich": {"Group", "RenderableType", "Table", "Text"},
}
"""Names of these modules that write nothing."""
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
ASKED = {"isatty", "flush", "fileno", "encoding"}
"""Attributes of a stream that write nothing."""
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def writings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the function and line of each place that may write text without a sink, or whose own words to a sink are
    no literal.
    """
    yield from _Reader(tree).places()


class _Reader:
    """One module."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    @functools.cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in nodes(self._tree) for child in ast.iter_child_nodes(node)}

    def places(self) -> Iterator[tuple[str, int]]:
        for node in nodes(self._tree):
            if self._is_written(node):
                yield self._function(node), node.lineno  # type: ignore[attr-defined]

    def _is_written(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in PRINTERS:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="write"), args=[ast.Constant(), *_]):
                return True
            case ast.Call(func=ast.Name(id="say"), args=[template, *_]):
                return not _is_literal(template)
            case ast.Call(func=ast.Attribute(value=receiver, attr=method), args=[message, *_]) if method in LOGGERS:
                return _is_logger(receiver) and not _is_literal(message)
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name in STREAMS:
                return not self._is_harmless_stream(node)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULES:
                return name not in HARMLESS.get(module, set())
            case ast.ImportFrom(module=module, names=names) if (module or "").partition(".")[0] in MODULES:
                harmless = HARMLESS.get(str(module).partition(".")[0], set())
                return not {each.name for each in names} <= harmless
        return False

    def _is_harmless_stream(self, node: ast.AST) -> bool:
        parent = self._parents[node]
        if isinstance(parent, ast.keyword | ast.IfExp):
            call = self._parents[parent]
            call = self._parents[call] if isinstance(call, ast.keyword) else call
            return isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("say", "say_lines")
        return isinstance(parent, ast.Attribute) and parent.attr in ASKED

    def _function(self, node: ast.AST) -> str:
        """Returns the name of the function around a node, with its class; empty on the module's own level."""
        names = []
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.append(node.name)
        return ".".join(reversed(names))


def _is_literal(node: ast.AST) -> bool:
    """Returns whether an expression is text of Manta's: a literal, or a constant of the module."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def _is_logger(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").endswith(("logger", "log"))
        case ast.Call(func=ast.Name(id="logger_of") | ast.Attribute(attr="getLogger")):
            return True
    return False


def test_only_the_sinks_write_to_terminals_and_logs() -> None:
    found = {
        (name, function): line
        for room in ROOMS
        for name, tree in modules(room).items()
        if name not in SINKS
        for function, line in writings(tree)
    }
    assert {place: line for place, line in found.items() if place not in PASSES} == {}
    assert PASSES.keys() - found.keys() == set(), "they write nothing any more"


@pytest.mark.parametrize(
    "line",
    [
        "print(path)",
        "print('literal')",
        "sys.stdout.write(path)",
        "sys.stderr.buffer.write(path)",
        "write = sys.stdout.write",
        "json.dump(data, sys.stdout)",
        "os.write(1, path)",
        "say(f'{path} is missing')",
        "say(path)",
        "say('a' + path)",
        "logger.warning(f'{path} is missing')",
        "self._logger.info(path)",
        "logger_of(__name__).error('%s' % path)",
        "logging.getLogger(__name__).error('%s', path)",
        "logging.warning('%s', path)",
        "warnings.warn(path)",
        "traceback.print_exc()",
        "from rich import print",
        "from click import echo",
        "click.echo(path)",
        "tqdm(things, path)",
    ],
)
def test_each_way_round_the_sinks_is_found(line: str) -> None:
    assert [function for function, _ in writings(ast.parse(f"class A:\n def f(self):\n  {line}\n"))][:1] == ["A.f"]


@pytest.mark.parametrize(
    "line",
    [
        "say('{} is missing', path, file=sys.stderr)",
        "say('{}', path, file=sys.stdout if quiet else sys.stderr)",
        "say_lines(lines, file=sys.stderr)",
        "pass_on(text)",
        "logger.warning('%s is missing', path)",
        "logger_of(__name__).warning(MISSING, path)",
        "sys.stdout.isatty()",
        "file.write(data)",
        "os.write(file, data)",
        "frame = traceback.extract_tb(trace)[-1]",
    ],
)
def test_the_sinks_may_be_used(line: str) -> None:
    assert not list(writings(ast.parse(f"class A:\n def f(self):\n  {line}\n")))
