"""Sets of characters that regular expressions name: `\\d`, `\\w`, `\\s`, `.`, `\\p{...}`, and what ignoring case adds.

The first four follow ECMA-262: `\\d` and `\\w` are ASCII. Properties come from the Unicode tables of the `regex`
package.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import regex

from manta.structured.regexes.automata import MAX_CHARACTER, Ranges, complement, ranges_of

DIGITS: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_SPACES = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x202F, 0x202F), (0x205F, 0x205F)]
SPACE: Ranges = ranges_of([*_SPACES, (0x2028, 0x2029), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
DOT: Ranges = complement(LINE_ENDS)
CLASSES: dict[str, Ranges] = {"d": DIGITS, "w": WORD, "s": SPACE}
"""The classes by the letter behind their backslash."""

_VALUED = frozenset(["General_Category", "gc", "Script", "sc", "Script_Extensions", "scx"])
_CATEGORIES = frozenset(
    [
        *("C", "Cc", "Cf", "Cn", "Co", "Cs", "L", "LC", "Ll", "Lm", "Lo", "Lt", "Lu", "M", "Mc", "Me", "Mn", "N"),
        *("Nd", "Nl", "No", "P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc", "Sk", "Sm", "So", "Z", "Zl"),
        *("Zp", "Zs", "Other", "Control", "cntrl", "Format", "Unassigned", "Private_Use", "Surrogate", "Letter"),
        *("Cased_Letter", "Lowercase_Letter", "Modifier_Letter", "Other_Letter", "Titlecase_Letter"),
        *("Uppercase_Letter", "Mark", "Combining_Mark", "Spacing_Mark", "Enclosing_Mark", "Nonspacing_Mark"),
        *("Number", "Decimal_Number", "digit", "Letter_Number", "Other_Number", "Punctuation", "punct"),
        *("Connector_Punctuation", "Dash_Punctuation", "Close_Punctuation", "Final_Punctuation"),
        *("Initial_Punctuation", "Other_Punctuation", "Open_Punctuation", "Symbol", "Currency_Symbol"),
        *("Modifier_Symbol", "Math_Symbol", "Other_Symbol", "Separator", "Line_Separator", "Paragraph_Separator"),
        *("Space_Separator"),
    ]
)
_BINARY = frozenset(
    [
        *("ASCII", "ASCII_Hex_Digit", "AHex", "Alphabetic", "Alpha", "Any", "Assigned", "Bidi_Control", "Bidi_C"),
        *("Bidi_Mirrored", "Bidi_M", "Case_Ignorable", "CI", "Cased", "Changes_When_Casefolded", "CWCF"),
        *("Changes_When_Casemapped", "CWCM", "Changes_When_Lowercased", "CWL", "Changes_When_Titlecased", "CWT"),
        *("Changes_When_Uppercased", "CWU", "Dash", "Default_Ignorable_Code_Point", "DI", "Deprecated", "Dep"),
        *("Diacritic", "Dia", "Emoji", "Emoji_Component", "EComp", "Emoji_Modifier", "EMod", "Emoji_Modifier_Base"),
        *("EBase", "Emoji_Presentation", "EPres", "Extended_Pictographic", "ExtPict", "Extender", "Ext"),
        *("Grapheme_Base", "Gr_Base", "Grapheme_Extend", "Gr_Ext", "Hex_Digit", "Hex", "ID_Continue", "IDC"),
        *("ID_Start", "IDS", "Ideographic", "Ideo", "Join_Control", "Join_C", "Logical_Order_Exception", "LOE"),
        *("Lowercase", "Lower", "Math", "Noncharacter_Code_Point", "NChar", "Pattern_Syntax", "Pat_Syn"),
        *("Pattern_White_Space", "Pat_WS", "Quotation_Mark", "QMark", "Radical", "Regional_Indicator", "RI"),
        *("Sentence_Terminal", "STerm", "Soft_Dotted", "SD", "Terminal_Punctuation", "Term", "Unified_Ideograph"),
        *("UIdeo", "Uppercase", "Upper", "Variation_Selector", "VS", "White_Space", "space", "XID_Continue", "XIDC"),
        *("XID_Start", "XIDS"),
    ]
)
"""Names of ECMA-262, tables 65 to 67. `regex` takes them in any spelling; ECMA-262 takes these alone."""
_ALL: dict[str, Ranges] = {"Any": ((0, MAX_CHARACTER),), "ASCII": ((0, 127),)}


@functools.lru_cache(maxsize=64)
def property_ranges(name: str) -> Ranges | None:
    """The characters of `\\p{name}`, where `name` may be `Property=Value`; None if ECMA-262 knows no such property, or
    `regex` does not.
    """
    kind, has_value, value = name.partition("=")
    is_value = value[:1].isupper() and value.replace("_", "").isalnum()
    known = (kind in _VALUED and is_value) if has_value else (kind in _CATEGORIES or kind in _BINARY)
    if not known:
        return None
    if kind in _ALL:
        return _ALL[kind]
    if kind == "Assigned":
        unassigned = property_ranges("Cn")
        return None if unassigned is None else complement(unassigned)
    try:
        found = regex.compile(rf"\p{{{name}}}+")
    except regex.error:
        return None
    return tuple((match.start(), match.end() - 1) for match in found.finditer(_every_character()))


def _every_character() -> str:
    return "".join(map(chr, range(MAX_CHARACTER + 1)))


@functools.cache
def _cases() -> dict[int, tuple[int, ...]]:
    """The other characters that simple case folding makes equal to each character."""
    groups: dict[str, list[int]] = {}
    for code in range(MAX_CHARACTER + 1):
        character = chr(code)
        if character.lower() != character or character.upper() != character or character.casefold() != character:
            groups.setdefault(_folded(character), []).append(code)
    for folded, codes in groups.items():
        if ord(folded) not in codes:
            codes.append(ord(folded))
    return {code: tuple(codes) for codes in groups.values() if len(codes) > 1 for code in codes}


def _folded(character: str) -> str:
    """Simple case folding (Unicode 5.18): one character for one."""
    folded = character.casefold()
    if len(folded) == 1:
        return folded
    lower = character.lower()
    return lower if len(lower) == 1 else character


def with_cases(ranges: Ranges) -> Ranges:
    """The set and all that differs from its members in case alone."""
    return ranges_of([*ranges, *_added(ranges)])


def _added(ranges: Ranges) -> Iterator[tuple[int, int]]:
    for code, others in _cases().items():
        if any(low <= code <= high for low, high in ranges):
            yield from ((other, other) for other in others)
