"""Cuts the rules of a grammar into terminals that llguidance's lexer divides as the grammar does.

The lexer reads the longest text that any terminal takes which may stand at its place, and goes back never. So a
terminal must end where no terminal can go on with what may follow it: of `[a-z]* "end"`, with letters as terminals, it
could not read `xenend`, because behind `en` it waits for `d`. A grammar without recursion is one terminal. In any
other, terminals are as long as they can be. Those that may go on too far are cut into shorter ones, down to characters.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

from manta.structured.gbnf.reading import ROOT, references
from manta.structured.regexes.automata import EMPTY, Dfa, TooLarge, Tree, positions

MAX_DEPTH = 100
"""Most levels of a tree that becomes an automaton."""


class Cut:
    """The rules of a grammar that are left, with `("terminal", tree)` in the place of trees that are terminals."""

    def __init__(self, rules: dict[str, Tree]) -> None:
        self._given = rules
        self._regular = _regular_rules(rules)
        self._whole: set[Tree] = set()
        """Trees that are too long for a terminal."""
        self._automata: dict[Tree, _Automaton | None] = {}
        self.rules: dict[str, Tree] = {}
        """Rules that `root` needs, with terminals that no terminal disturbs."""
        while True:
            self.rules = self._cut_rules()
            disturbing = _disturbing(self.rules, self._automata)
            if not disturbing:
                break
            self._whole |= disturbing

    @property
    def is_regular(self) -> bool:
        """Whether one terminal takes all texts."""
        return ROOT in self._regular

    def _cut_rules(self) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        pending = [ROOT]
        while pending:
            name = pending.pop()
            if name not in found:
                found[name] = self._cut(self._given[name])
                pending += references(found[name])
        return found

    def _cut(self, tree: Tree) -> Tree:
        automaton = self._automaton(tree)
        if automaton is not None:
            if tree == EMPTY or not automaton.first:
                return EMPTY
            terminal = ("terminal", tree)
            return ("repeat", terminal, 0, 1) if automaton.is_nullable else terminal
        kind = tree[0]
        if kind == "repeat":
            return "repeat", self._cut(tree[1]), tree[2], tree[3]
        if kind == "cat":
            return "cat", tuple(map(self._cut, self._in_runs(tree[1])))
        if kind == "alt":
            able = [way for way in tree[1] if self._automaton(way) is not None]
            others = [way for way in tree[1] if self._automaton(way) is None]
            return "alt", tuple(map(self._cut, [*self._together("alt", able), *others]))
        return tree

    def _in_runs(self, parts: Sequence[Tree]) -> Iterator[Tree]:
        """Yields the parts of a sequence. Neighbours that can be one terminal are one part."""
        run: list[Tree] = []
        for part in parts:
            if self._automaton(part) is not None:
                run.append(part)
                continue
            yield from self._together("cat", run)
            yield part
            run = []
        yield from self._together("cat", run)

    def _together(self, kind: str, parts: list[Tree]) -> list[Tree]:
        """Returns parts that can be terminals, joined where halves of them, or all, can be one terminal."""
        if len(parts) < 2:
            return parts
        tree: Tree = (kind, tuple(parts))
        if self._automaton(tree) is not None:
            return [tree]
        middle = len(parts) // 2
        return self._together(kind, parts[:middle]) + self._together(kind, parts[middle:])

    def _automaton(self, tree: Tree) -> _Automaton | None:
        """The automaton of a tree that can be a terminal, else None."""
        if tree in self._whole:
            return None
        if tree not in self._automata:
            self._automata[tree] = self._made(tree)
        return self._automata[tree]

    def _made(self, tree: Tree) -> _Automaton | None:
        if not self._regular.issuperset(references(tree)):
            return None
        try:
            return _Automaton(Dfa.of(self._expanded(tree, MAX_DEPTH)))
        except TooLarge:
            return None

    def _expanded(self, tree: Tree, depth: int) -> Tree:
        """The tree with the trees of rules in the place of their names. Raises `TooLarge` if it is too deep."""
        if depth == 0:
            raise TooLarge
        kind = tree[0]
        if kind == "rule":
            return self._expanded(self._given[tree[1]], depth - 1)
        if kind == "repeat":
            return "repeat", self._expanded(tree[1], depth - 1), tree[2], tree[3]
        if kind in ("cat", "alt"):
            return kind, tuple(self._expanded(each, depth - 1) for each in tree[1])
        return tree


def _regular_rules(rules: dict[str, Tree]) -> set[str]:
    """Returns the rules that lead to no rule that leads back to itself."""
    found: set[str] = set()
    while True:
        more = {name for name, tree in rules.items() if name not in found and found.issuperset(references(tree))}
        if not more:
            return found
        found |= more


class _Automaton:
    """The texts of one terminal."""

    def __init__(self, dfa: Dfa) -> None:
        self.dfa = dfa
        self.is_nullable = 0 in dfa.accepting
        leads_to: list[set[int]] = [set() for _ in dfa.targets]
        for state, row in enumerate(dfa.targets):
            for target in row:
                leads_to[target].add(state)
        self.live, pending = set(dfa.accepting), list(dfa.accepting)
        """States from which a text can be completed."""
        while pending:
            new = leads_to[pending.pop()] - self.live
            self.live |= new
            pending += new
        self.first = any(target in self.live for target in dfa.targets[0])
        """Whether a text has a first character."""


# ---- terminals that go on too far ----------------------------------------------------------------------------------


class _Characters:
    """The characters in classes that no terminal tells apart; a set of classes is the bits of an integer."""

    def __init__(self, automata: dict[Tree, _Automaton]) -> None:
        self._automata = automata
        edges = sorted({edge for each in automata.values() for edge in each.dfa.edges})
        self._places = {tree: positions(edges, each.dfa.edges) for tree, each in automata.items()}

    def targets(self, tree: Tree, state: int) -> list[int]:
        """The state that each class leads to."""
        row = self._automata[tree].dfa.targets[state]
        return [row[place] for place in self._places[tree]]

    def first(self, tree: Tree) -> int:
        """The classes that a text of a terminal begins with."""
        live = self._automata[tree].live
        return sum(1 << index for index, target in enumerate(self.targets(tree, 0)) if target in live)

    def beyond(self, tree: Tree, other: Tree) -> int:
        """The classes by which a text of `other` may go on behind a text of `tree`."""
        mine, theirs = self._automata[tree], self._automata[other]
        found, seen, pending = 0, {(0, 0)}, [(0, 0)]
        while pending:
            one, two = pending.pop()
            is_end = one in mine.dfa.accepting and (one, two) != (0, 0)
            pairs = zip(self.targets(tree, one), self.targets(other, two), strict=True)
            for index, (left, right) in enumerate(pairs):
                if right not in theirs.live:
                    continue
                if is_end:
                    found |= 1 << index
                if left in mine.live and (left, right) not in seen:
                    seen.add((left, right))
                    pending.append((left, right))
        return found


def _disturbing(rules: dict[str, Tree], automata: dict[Tree, _Automaton | None]) -> set[Tree]:
    """Returns the terminals that may go on where the text of another, or their own, ends and something follows."""
    terminals = {tree: automaton for tree in _terminals(rules) if (automaton := automata[tree]) is not None}
    characters = _Characters(terminals)
    follows = _Follows(rules, characters).of_terminals
    firsts = {tree: characters.first(tree) for tree in terminals}
    return {
        other
        for tree, follow in follows.items()
        if follow
        for other in terminals
        if other[0] != "set" and firsts[tree] & firsts[other] and characters.beyond(tree, other) & follow
    }


def _terminals(rules: dict[str, Tree]) -> set[Tree]:
    found: set[Tree] = set()
    pending = list(rules.values())
    while pending:
        kind, *rest = pending.pop()
        if kind == "terminal":
            found.add(rest[0])
        elif kind == "repeat":
            pending.append(rest[0])
        elif kind != "rule":
            pending += rest[0]
    return found


class _Follows:
    """The classes of characters that may follow each terminal (Aho, Sethi and Ullman, section 4.4)."""

    def __init__(self, rules: dict[str, Tree], characters: _Characters) -> None:
        self.of_terminals: dict[Tree, int] = {}
        self._first_of_terminal = functools.cache(characters.first)
        self._firsts: dict[str, tuple[int, bool]] = dict.fromkeys(rules, (0, False))
        """The classes that each rule begins with, and whether it may be empty."""
        while (firsts := {name: self._first(tree) for name, tree in rules.items()}) != self._firsts:
            self._firsts = firsts
        self._of_rules = dict.fromkeys(rules, 0)
        known = None
        while known != self._of_rules:
            known = dict(self._of_rules)
            for name, tree in rules.items():
                self._walk(tree, self._of_rules[name])

    def _first(self, tree: Tree) -> tuple[int, bool]:
        """Returns the classes that a tree begins with, and whether it may be empty."""
        kind = tree[0]
        if kind == "terminal":
            return self._first_of_terminal(tree[1]), False
        if kind == "rule":
            return self._firsts[tree[1]]
        if kind == "repeat":
            first, is_nullable = self._first(tree[1])
            return first, is_nullable or tree[2] == 0
        firsts = [self._first(each) for each in tree[1]]
        if kind == "alt":
            return functools.reduce(operator.or_, (first for first, _ in firsts), 0), any(empty for _, empty in firsts)
        found = 0
        for first, is_nullable in firsts:
            found |= first
            if not is_nullable:
                return found, False
        return found, True

    def _walk(self, tree: Tree, follow: int) -> None:
        """Adds what follows the tree to the terminals and rules at its end, and what follows within it."""
        kind = tree[0]
        if kind == "terminal":
            self.of_terminals[tree[1]] = self.of_terminals.get(tree[1], 0) | follow
        elif kind == "rule":
            self._of_rules[tree[1]] |= follow
        elif kind == "repeat":
            self._walk(tree[1], follow | (self._first(tree[1])[0] if tree[3] != 1 else 0))
        elif kind == "alt":
            for each in tree[1]:
                self._walk(each, follow)
        else:
            for each in reversed(tree[1]):
                self._walk(each, follow)
                first, is_nullable = self._first(each)
                follow = first | (follow if is_nullable else 0)
