"""Writes a grammar of GBNF for the backends: in llguidance's Lark, and in the EBNF of xgrammar."""

from __future__ import annotations

from collections.abc import Callable

from manta.structured.constraint import ConstraintError
from manta.structured.gbnf.reading import ROOT, nullable_rules, read_gbnf, references
from manta.structured.gbnf.terminals import Cut
from manta.structured.regexes.automata import MAX_CHARACTER, Ranges, Tree, class_text


def gbnf_as_lark(text: str) -> str:
    """Returns the grammar in Lark. Raises `ConstraintError` for what `read_gbnf` refuses."""
    return _written(text, lambda rules: _Lark(rules).grammar())


def gbnf_as_ebnf(text: str) -> str:
    """Returns the grammar as xgrammar reads it. Raises `ConstraintError` for what `read_gbnf` refuses."""
    return _written(text, _ebnf)


def _written(text: str, write: Callable[[dict[str, Tree]], str]) -> str:
    try:
        return write(read_gbnf(text))
    except RecursionError as error:
        raise ConstraintError.because("unfit", "ebnf", cause="its brackets are nested too deep") from error


class _Lark:
    """A grammar without recursion becomes one terminal, and each of its rules a part of it."""

    def __init__(self, rules: dict[str, Tree]) -> None:
        self._given = rules
        self._cut = Cut(rules)
        self._rules = {name: f"r{index}" for index, name in enumerate(rules)}
        self._parts = {name: f"PART_{index}" for index, name in enumerate(rules)}
        self._terminals: dict[Tree, str] = {}

    def grammar(self) -> str:
        if self._cut.is_regular:
            start: Tree = ("terminal", ("rule", ROOT))
            if ROOT in nullable_rules(self._given):
                start = ("repeat", start, 0, 1)
            lines = [f"start: {self._in_rule(start)}"]
        else:
            lines = [f"start: {self._rules[ROOT]}"]
            lines += [f"{self._rules[name]}: {self._in_rule(tree)}" for name, tree in self._cut.rules.items()]
        lines += [f"{name}: {self._in_terminal(tree)}" for tree, name in self._terminals.items()]
        return "\n".join([*lines, *self._lines_of_parts()]) + "\n"

    def _lines_of_parts(self) -> list[str]:
        """Returns the rules that terminals name."""
        found: dict[str, str] = {}
        pending = [name for tree in self._terminals for name in references(tree)]
        while pending:
            name = pending.pop()
            if name not in found:
                found[name] = f"{self._parts[name]}: {self._in_terminal(self._given[name])}"
                pending += references(self._given[name])
        return list(found.values())

    def _in_rule(self, tree: Tree) -> str:
        kind = tree[0]
        if kind == "terminal":
            return self._terminals.setdefault(tree[1], f"TERMINAL_{len(self._terminals)}")
        return self._rules[tree[1]] if kind == "rule" else _joined(tree, self._in_rule)

    def _in_terminal(self, tree: Tree) -> str:
        if tree[0] == "rule":
            return self._parts[tree[1]]
        if not references(tree):
            regex = _regex(tree)
            return f"/{regex}/" if regex else '""'
        return _joined(tree, self._in_terminal)


def _joined(tree: Tree, write: Callable[[Tree], str]) -> str:
    """Returns a sequence, alternatives or a repetition in brackets, as Lark and EBNF write them."""
    kind = tree[0]
    if kind == "repeat":
        return f"({write(tree[1])}){{{tree[2]},{'' if tree[3] is None else tree[3]}}}"
    parts = [write(each) for each in tree[1]] or ['""']
    return f"({(' ' if kind == 'cat' else ' | ').join(parts)})"


def _regex(tree: Tree) -> str:
    """Returns a tree without rules as a regular expression."""
    kind = tree[0]
    if kind == "set":
        return class_text(tree[1])
    if kind == "cat":
        return "".join(_grouped(each) if each[0] == "alt" else _regex(each) for each in tree[1])
    if kind == "alt":
        return "|".join(map(_regex, tree[1]))
    return f"{_grouped(tree[1])}{{{tree[2]},{'' if tree[3] is None else tree[3]}}}"


def _grouped(tree: Tree) -> str:
    return _regex(tree) if tree[0] == "set" else f"(?:{_regex(tree)})"


# ---- xgrammar ------------------------------------------------------------------------------------------------------


def _ebnf(rules: dict[str, Tree]) -> str:
    names = {name: f"r{index}" for index, name in enumerate(rules)} | {ROOT: ROOT}

    def write(tree: Tree) -> str:
        if tree[0] == "rule":
            return names[tree[1]]
        return _class(tree[1]) if tree[0] == "set" else _joined(tree, write)

    return "".join(f"{names[name]} ::= {write(tree)}\n" for name, tree in rules.items())


def _class(ranges: Ranges) -> str:
    return f"[{''.join(f'{_code(low)}-{_code(high)}' for low, high in ranges)}]"


def _code(code: int) -> str:
    return f"\\U{min(code, MAX_CHARACTER):08x}"
