"""Nothing is decided by the words of an error: kinds, fields and bounds are data, and sentences are for people.

Read from the syntax trees of the product. Functions that read other libraries' messages are listed, each with its
reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import get_args

import pytest

from manta.cluster.protocol.error_bodies import ANSWERS
from manta.structured.refusals import WORDS, Kind
from tests.house.syntax_trees import ROOMS, modules, nodes

LLGUIDANCE = "llguidance tells what is wrong in words only"
MSGSPEC = "msgspec's errors are sentences that end with a path"
SERVE = "Serve tells the state of a deployment in words, in which it quotes tracebacks"
READERS = {
    ("manta.structured.backends.llguidance", "_refusal"): LLGUIDANCE,
    ("manta.structured.backends.llguidance", "check_matcher"): LLGUIDANCE,
    (
        "manta.structured.backends.llguidance",
        "without_source",
    ): "llguidance shows lines of the grammar within its words",
    ("manta.structured.backends.llguidance_grammar", "place_within"): LLGUIDANCE,
    ("manta.structured.backends.llguidance_schema", "place_of"): LLGUIDANCE,
    ("manta.structured.backends.llguidance_schema", "_is_quoted"): LLGUIDANCE,
    ("manta.workers.adapters.adapter_sources", "local_adapter"): "the user's URL replaces a temporary folder's name",
    ("manta.workers.jax_worker.jax_worker", "_named_memory_errors"): "XLA's errors have their status in the text",
    ("manta.workers.kernels.triton.library_products", "_runs"): "the first line of torch's message is logged",
    ("manta.cluster.protocol.shape_errors", "shape_error"): MSGSPEC,
    ("manta.cluster.option_reader", "read_options"): MSGSPEC,
    ("manta.cluster.cli.server", "no_server"): "requests wraps OpenSSL's error in a text",
    ("manta.cluster.cli.chat", "_talk"): "`message` is what the user typed",
    ("manta.cluster.cli.chat", "_handle"): "`message` is what the user typed",
    ("manta.cluster.serve.listening.tls", "_load"): "`reason` is OpenSSL's code",
    ("manta.cluster.serve.scaling.cluster_state", "_note"): SERVE,
    ("manta.cluster.serve.starting.joined_ray", "_token"): "the first sentence of Ray's message is told",
    (
        "manta.cluster.serve.starting.start_failure",
        "_ray_error_in_words",
    ): "the first sentence of Ray's message is told",
    ("manta.cluster.serve.starting.start_failure", "waiting_for_room"): SERVE,
    ("manta.cluster.serve.starting.start_failure", "cause_of"): SERVE,
    ("manta.cluster.serve.starting.start_failure", "last_exception"): SERVE,
    ("manta.cluster.serve.starting.start_failure", "_cause_of_death"): SERVE,
    ("manta.cluster.serve.starting.start_watch", "_cannot_start"): SERVE,
    ("manta.cluster.serve.starting.start_watch", "_watch"): SERVE,
    ("manta.cluster.serve.starting.start_watch", "_is_or_was_ready"): SERVE,
    ("manta.cluster.serve.recorded.streams", "on_kept"): "`refused` holds ids of streams",
}
"""Functions, by module, that read words of another library, or none at all, and why."""

TEXTS = {"message", "reason", "refused", "sentence", "remedy", "cause", "why"}
"""Names of variables and attributes that hold the words of an error."""
ERRORS = {"error", "refusal", "failure"}
"""Names of variables that hold an error, besides those of `except ... as`."""
WRITERS = {"str", "repr", "sentence", "in_words", "first_sentence"}
"""Functions that put an error into words."""
METHODS = {
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "partition", "rpartition"),
    *("removeprefix", "removesuffix", "replace"),
}
EXPRESSIONS = {"search", "match", "fullmatch", "sub", "subn", "findall", "finditer"}
"""Methods of `re` and of its patterns."""
SAME = {"strip", "lstrip", "rstrip", "lower", "casefold"}
"""Methods whose result says the same."""


def readings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the function and line of each place that decides by the words of an error."""
    for function in nodes(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((function.name, line) for line in _Words(function).readings())


class _Words:
    """The words of errors in one function."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._nodes = list(ast.walk(function))
        self._errors = ERRORS | {
            each.name for each in self._nodes if isinstance(each, ast.ExceptHandler) and each.name is not None
        }
        self._names = set(TEXTS)
        for _ in range(2):  # a variable may be assigned from another one
            for each in self._nodes:
                if isinstance(each, ast.Assign) and self._are_words(each.value):
                    self._names |= {target.id for target in each.targets if isinstance(target, ast.Name)}

    def readings(self) -> Iterator[int]:
        for node in self._nodes:
            match node:
                case ast.Compare(left=left, ops=ops, comparators=others):
                    compares = not all(isinstance(each, ast.Is | ast.IsNot) for each in ops)
                    if compares and any(map(self._are_words, (left, *others))):
                        yield node.lineno
                case ast.Call(func=ast.Attribute(value=value, attr=method), args=arguments):
                    reads = method in METHODS and self._are_words(value)
                    if reads or (method in EXPRESSIONS and any(map(self._are_words, arguments))):
                        yield node.lineno

    def _are_words(self, node: ast.AST) -> bool:
        """Returns whether an expression is the words of an error, or is made of them."""
        match node:
            case ast.Name(id=name):
                return name in self._names
            case ast.Attribute(value=value, attr=attribute):
                return attribute in TEXTS or (attribute == "args" and self._is_error(value))
            case ast.Subscript(value=value):
                return isinstance(value, ast.Attribute) and value.attr == "args" and self._is_error(value.value)
            case ast.Call(func=ast.Name(id=name), args=[argument, *_]) if name in WRITERS:
                return self._is_error(argument) or self._are_words(argument)
            case ast.Call(func=ast.Attribute(value=value, attr=method)):
                return method in SAME and self._are_words(value)
            case ast.JoinedStr(values=parts):
                shown = [each.value for each in parts if isinstance(each, ast.FormattedValue)]
                return any(self._is_error(each) or self._are_words(each) for each in shown)
            case ast.BinOp(left=left, right=right):
                return self._are_words(left) or self._are_words(right)
            case ast.BoolOp(values=values):
                return any(map(self._are_words, values))
        return False

    def _is_error(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self._errors


def product() -> dict[str, ast.Module]:
    return {name: tree for room in ROOMS for name, tree in modules(room).items()}


def test_no_code_reads_the_words_of_a_refusal() -> None:
    found = {(name, function): line for name, tree in product().items() for function, line in readings(tree)}
    assert {place: line for place, line in found.items() if place not in READERS} == {}
    assert READERS.keys() - found.keys() == set(), "they read nothing any more"


@pytest.mark.parametrize(
    "line",
    [
        "'tokens' in str(error)",
        "'tokens' in error.args[0]",
        "error.message.startswith('prompt')",
        "str(error) == 'too long'",
        "re.search('tokens', f'{error}')",
        "PATTERN.fullmatch(str(error).strip())",
        "'draft' in reason",
        "'tokens' in (result.refused or '')",
        "'tokens' in error.refusal.cause",
        "(text := 1) and said.partition(':')",
        "sentence(error).removeprefix('prompt')",
    ],
)
def test_each_way_to_read_words_is_found(line: str) -> None:
    source = f"def f(result, reason):\n try: g()\n except E as error:\n  said = str(error)\n  return {line}\n"
    assert list(readings(ast.parse(source))) == [("f", 5)]


@pytest.mark.parametrize(
    "line",
    [
        "error.refusal.kind == 'queue_full'",
        "error.refusal.field.startswith('response_format')",
        "error.refusal.value in (1, 2)",
        "reason is None",
        "log(f'{error}')",
        "'tokens' in error.names",
    ],
)
def test_data_may_be_read(line: str) -> None:
    assert not list(readings(ast.parse(f"def f(reason):\n try: g()\n except E as error:\n  return {line}\n")))


def test_every_kind_has_words_and_is_raised() -> None:
    kinds = set(get_args(Kind))
    assert kinds == set(WORDS)
    assert not ANSWERS.keys() - kinds
    tables = {"manta.structured.refusals", "manta.cluster.errors", "manta.cluster.protocol.error_bodies"}
    used = {
        node.value
        for name, tree in product().items()
        if name not in tables
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert kinds - used == {"bug"}, "no code raises them"
