r"""The ways in which llama.cpp splits a text into words before it merges bytes, by the names of `tokenizer.ggml.pre`.

A word is a match of a pattern, or the text between two matches. Each pattern of a name splits the words of the
patterns before it. The names and what they mean are llama.cpp's (`src/llama-vocab.cpp`, `src/unicode.cpp`), also where
a published `tokenizer.json` differs: a GGUF file has the name only. The patterns are written for Oniguruma, which
`tokenizers` uses; its `\p{…}`, `\s` and lookaheads have the same meaning there. llama.cpp knows no letter case beyond
ASCII, so `[\p{L}&&[^a-z]]` stands for capital letters.
"""

from __future__ import annotations

from typing import NamedTuple


class Splitting(NamedTuple):
    """The splitting that belongs to a name."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    """Whether a word that is a token becomes this token, however merges would build it."""
    adds_bos: bool = False
    """Whether texts begin with the BOS token if the file does not say so itself."""


def _any(*patterns: str) -> str:
    return "|".join(patterns)


_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SUFFIX = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
"""English contractions, such as 's and 'LL."""
_CAPITAL, _SMALL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CAPITAL_OR_MARK, _SMALL_OR_MARK = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
_KANA_AND_HAN = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = r"[[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]&&\S]+"
"""Includes most scripts. llama.cpp replaces spaces beyond ASCII before it matches a class without categories."""
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_THREE_DIGITS_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""A group of digits together with the text before it, as llama.cpp cuts them."""
_ASCII_PUNCTUATION_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+"


def _cased(capital: str, small: str, suffix: str, digits: str) -> str:
    """Returns the pattern whose words change from small letters to a capital nowhere."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = (f"{start}{capital}*{small}+{suffix}", f"{start}{capital}+{small}*{suffix}")
    return _any(*words, digits, _SYMBOLS_AND_SLASHES, _LINES, _SPACES)


_GPT2 = _any("'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _SPACES)
_LLAMA3 = _any(_SUFFIX, _WORD, _THREE_DIGITS, _SYMBOLS, _LINES, _SPACES)
_QWEN2 = _any(_SUFFIX, _WORD, _DIGIT, _SYMBOLS, _LINES, _SPACES)
_GPT4O = _cased(_CAPITAL, _SMALL, f"(?:{_SUFFIX})?", _THREE_DIGITS)
_LETTERS_AND_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+" + f"(?:{_SUFFIX})?"
_DEEPSEEK3_WORDS = (_ASCII_PUNCTUATION_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
_DEEPSEEK3 = _any(*_DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES, _SPACES)
_JAIS2_SPACES = _any(*(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s")
_BLOOM = r" ?[^(\s|.,!?)\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c]+"
_HAN = (
    r"\u4e00-\u9fff\u3400-\u4dbf\x{20000}-\x{2a6df}\x{2a700}-\x{2b73f}\x{2b740}-\x{2b81f}\x{2b820}-\x{2ceaf}"
    r"\x{2ceb0}-\x{2ebef}\uf900-\ufaff\x{2f800}-\x{2fa1f}"
)
_KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_SUFFIX})?"
_ASIAN_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ud7ff\ue000-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BEFORE_THREES = r"(?=(?:[0-9]{3})+(?![0-9]))"
"""The place before groups of three digits, up to the end of a number."""
_CASED_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""The letters with a case that deepseek-llm knows."""
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+",
    r"[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
    r"[\u3105-\u312f]+",
    _KANA_AND_HAN,
)

_TABLE: tuple[tuple[str, Splitting], ...] = (
    (
        "default",
        Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling "
        "exaone4 jina-v1-en roberta-bpe",
        Splitting((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        Splitting((_DIGIT, _GPT2)),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Splitting((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Splitting((_LLAMA3,))),
    ("glm4 glm5", Splitting((_LLAMA3,), ignores_merges=True)),
    (
        "minicpm5",
        Splitting(
            (_THREE_DIGITS, _any(_SUFFIX, _WORD, r"\p{N}+", _SYMBOLS, _LINES, _SPACES)),
            ignores_merges=True,
        ),
    ),
    ("jais-2", Splitting((_any(_SUFFIX, _WORD, _THREE_DIGITS, _SYMBOLS, _LINES, _JAIS2_SPACES),))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
        Splitting((_QWEN2,)),
    ),
    (
        "qwen35",
        Splitting(
            (
                _any(
                    _SUFFIX,
                    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    _DIGIT,
                    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                    _LINES,
                    _SPACES,
                ),
            )
        ),
    ),
    ("ufakzeka", Splitting((_any(_WORD, _DIGIT, _SYMBOLS, _LINES, _SPACES),))),
    ("laguna", Splitting((r"[^\n]+|\n+", _QWEN2))),
    (
        "exaone-moe",
        Splitting(
            (
                _any(
                    _SUFFIX,
                    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    _DIGIT,
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    r"\s*[\r\n]",
                    _SPACES,
                ),
            )
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        Splitting((_any(_SUFFIX, _WORD, _DIGIT, _SYMBOLS, r"\s*[\r\n]", _SPACES),)),
    ),
    (
        "seed-coder",
        Splitting((_any(_SUFFIX, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _SPACES),)),
    ),
    (
        "tekken",
        Splitting((_cased(_CAPITAL, _SMALL, "", _DIGIT),), ignores_merges=True, adds_bos=True),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Splitting((_GPT4O,))),
    (
        "granite-embed-multi-97m",
        Splitting(
            (_cased(_CAPITAL_OR_MARK, _SMALL_OR_MARK, f"(?:{_SUFFIX})?", _THREE_DIGITS),),
            ignores_merges=True,
        ),
    ),
    (
        "tiny_aya cohere2moe",
        Splitting(
            (
                _THREE_DIGITS_FROM_THE_RIGHT,
                _any(_LETTERS_AND_MARKS, _THREE_DIGITS, _SYMBOLS_AND_SLASHES, _LINES, _SPACES),
            )
        ),
    ),
    (
        "youtu",
        Splitting(
            (
                _any(*_YOUTU_SCRIPTS),
                _any(_LETTERS_AND_MARKS, _DIGIT, _SYMBOLS_AND_SLASHES, _LINES, _SPACES),
            ),
            ignores_merges=True,
        ),
    ),
    (
        "deepseek-llm",
        Splitting(
            (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_PUNCTUATION, r"\s+\z", _CJK, r"\p{N}+"),
        ),
    ),
    ("deepseek-coder", Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitting((_THREE_DIGITS, _KANA_AND_HAN, _DEEPSEEK3))),
    (
        "spark2_5",
        Splitting(
            (
                _THREE_DIGITS,
                _KANA_AND_HAN,
                _any(*_DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+", r"[\r\n]", _SPACES),
                _DIGIT,
            )
        ),
    ),
    ("afmoe", Splitting((_THREE_DIGITS_FROM_THE_RIGHT, _ASIAN_SCRIPTS, _DEEPSEEK3))),
    ("falcon", Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"))),
    ("poro-chat bloom gpt3-finnish", Splitting((_BLOOM,))),
    ("viking", Splitting((_BLOOM, _DIGIT))),
    (
        "chameleon",
        Splitting(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
    ),
    (
        "superbpe",
        Splitting((r"\p{N}+", rf"{_BEFORE_THREES}(?m:.)(?:(?!{_BEFORE_THREES})(?m:.))*")),
    ),
    (
        "kimi-k2",
        Splitting((_any(f"[{_HAN}]+", _KIMI_WORD, _THREE_DIGITS, _SYMBOLS, _LINES, _SPACES),)),
    ),
)

SPLITTINGS: dict[str, Splitting] = {name: splitting for names, splitting in _TABLE for name in names.split()}
"""The splitting of each name that is served."""

REFUSED = {
    "gemma4": "merges characters, not bytes",
    "granite-embed-multi-311m": "merges characters, not bytes",
    "jina-v2-code": "is an encoder's",
    "jina-v2-de": "is an encoder's",
    "jina-v2-es": "is an encoder's",
    "sarvam-moe": "merges characters, not bytes",
    "whitespace": "looks up whole words",
}
"""The names of llama.cpp that are not served, and why."""
