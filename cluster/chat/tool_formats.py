"""The formats in which models write tool calls, as data. A model's chat template shows which one it uses.

`cluster/chat/tool_parser.py` reads a format, and the grammar of `cluster/chat/tool_grammar.py` enforces it. The formats
are those of the models' own chat templates. What a template leaves open is as vLLM's and SGLang's parsers read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a model's calls: `begin`, one call or more, `end`."""

    name: str
    begin: str
    """Opens the calls. A model's text before this mark is its answer."""
    other_begin: str = ""
    """Another text that opens calls, for models that differ in this alone."""
    end: str = ""
    calls: Literal["each", "list", "section", "one"] = "each"
    """Form of several calls: `each` has its own `begin` and `end`; a `list` is one `[...]` with commas; a `section` has
    them one after the other; `one` allows a single call.
    """
    call: str = ""
    """Form of one call, with `{name}` and `{arguments}`, and `{index}` or `{id}` where the model counts or names its
    calls. If empty, a call is a JSON object with the three keys that follow.
    """
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    """Key of the number that the model gives each call; empty if calls have no number."""
    argument: str = ""
    """Form of one argument, with `{key}` and `{value}`; if empty, the arguments are one JSON object."""
    values: Literal["json", "raw", "python", "delimited"] = "json"
    """Form of `{value}`: JSON; strings without quotes and everything else as JSON (`raw`); literals of Python; or JSON
    whose keys have no quotes and whose strings stand between two `quote` (`delimited`).
    """
    quote: str = ""
    """Text at both ends of a string of `delimited` values."""
    call_id: str = ""
    """Id that a client gets for a call, made of the placeholders in `call`; if empty, a new id."""
    has_short_ids: bool = False
    """Whether new ids are 9 letters and digits, because the chat template takes no others."""
    is_bare: bool = False
    """Whether `begin` may be missing if the answer is nothing but calls."""
    is_channel: bool = False
    """Whether calls are messages of OpenAI's harmony format, beside channels for reasoning and answer."""

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts that open calls, the usual one first."""
        return (self.begin, self.other_begin) if self.other_begin else (self.begin,)

    @property
    def parts(self) -> tuple[str, ...]:
        """All texts of the format. Special tokens within them must stay in the answer's text."""
        return (*self.begins, self.call, self.argument, self.quote, self.end)

    def bare_starts(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the texts with which an answer begins that is nothing but calls of these functions, and that no other
        answer may begin with; none if `begin` must not be missing.
        """
        if not self.is_bare:
            return ()
        return tuple(f"[{name}(" for name in names) if self.call else (f'{{"{self.name_key}":',)

    def pieces(self) -> list[str]:
        """Pieces of `call`, cut at its placeholders: texts and `{...}` in turn."""
        return [piece for piece in _PLACEHOLDER.split(self.call) if piece]

    def argument_marks(self) -> tuple[str, str, str]:
        """The texts of `argument` before the key, between key and value, and after the value."""
        before, _, rest = self.argument.partition("{key}")
        between, _, after = rest.partition("{value}")
        return before, between, after

    def text_marks(self) -> tuple[str, str, str]:
        """The texts before the key, between key and value, and after the value of a single argument that is a text
        without escapes. The last one begins with what no such text holds.
        """
        if self.values == "delimited":
            return "{", f":{self.quote}", f"{self.quote}}}"
        return self.argument_marks()


_PLACEHOLDER = re.compile(r"(\{(?:name|index|id|arguments)\})")

HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>")
MISTRAL = ToolFormat(name="mistral", begin="[TOOL_CALLS]", calls="list", has_short_ids=True)
MISTRAL_ARGS = ToolFormat(name="mistral_args", begin="[TOOL_CALLS]", call="{name}[ARGS]{arguments}", has_short_ids=True)
MISTRAL_CALL_ID = ToolFormat(
    name="mistral_call_id", begin="[TOOL_CALLS]", call="{name}[CALL_ID]{id}[ARGS]{arguments}", call_id="{id}"
)
LLAMA3 = ToolFormat(name="llama3", begin="<|python_tag|>", arguments_key="parameters", calls="one", is_bare=True)
PYTHONIC = ToolFormat(
    name="pythonic",
    begin="<|python_start|>",
    end="<|python_end|>",
    calls="list",
    call="{name}({arguments})",
    argument="{key}={value}",
    values="python",
    is_bare=True,
)
GRANITE = ToolFormat(name="granite", begin="<|tool_call|>", other_begin="<tool_call>", calls="list")
NEMOTRON = ToolFormat(name="nemotron", begin="<TOOLCALL>", end="</TOOLCALL>", calls="list")
APRIEL = ToolFormat(name="apriel", begin="<tool_calls>", end="</tool_calls>", calls="list")
LFM2 = ToolFormat(
    name="lfm2",
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    calls="list",
    call="{name}({arguments})",
    argument="{key}={value}",
    values="python",
)
GEMMA4 = ToolFormat(
    name="gemma4",
    begin="<|tool_call>",
    end="<tool_call|>",
    call="call:{name}{arguments}",
    argument="{key}:{value}",
    values="delimited",
    quote='<|"|>',
)
PHI4 = ToolFormat(name="phi4", begin="<|tool_call|>", end="<|/tool_call|>", calls="list")
PHI4_FUNCTOOLS = ToolFormat(name="phi4_functools", begin="functools", calls="list")
COHERE = ToolFormat(
    name="cohere",
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    calls="list",
    id_key="tool_call_id",
    name_key="tool_name",
    arguments_key="parameters",
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    begin="<tool_call>",
    end="</tool_call>",
    call="\n<function={name}>\n{arguments}</function>\n",
    argument="<parameter={key}>\n{value}\n</parameter>\n",
    values="raw",
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    call="\n<function={name}>\n{arguments}</function>\n",
    argument="<parameter={key}>{value}</parameter>\n",
    values="raw",
)
GLM = ToolFormat(
    name="glm",
    begin="<tool_call>",
    end="</tool_call>",
    call="{name}\n{arguments}",
    argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    values="raw",
)
GLM47 = ToolFormat(
    name="glm47",
    begin="<tool_call>",
    end="</tool_call>",
    call="{name}{arguments}",
    argument="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    values="raw",
)
MINIMAX = ToolFormat(
    name="minimax",
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    calls="section",
    call='\n<invoke name="{name}">\n{arguments}</invoke>',
    argument='<parameter name="{key}">{value}</parameter>\n',
    values="raw",
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    calls="section",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    calls="section",
    call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    calls="section",
    call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    call_id="functions.{name}:{index}",
)
GPT_OSS = ToolFormat(
    name="gpt_oss",
    begin="<|channel|>commentary to=functions.",
    end="<|call|>",
    calls="one",
    call="{name} <|constrain|>json<|message|>{arguments}",
    is_channel=True,
)

FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI_K2),
    (("<|im_system|>tool_declare",), KIMI_K2),
    (("<|START_ACTION|>",), COHERE),
    (("<|channel|>", "functions."), GPT_OSS),
    (("<|tool_call>call:",), GEMMA4),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("<minimax:tool_call>",), MINIMAX),
    (("<TOOLCALL>[",), NEMOTRON),
    (("<tool_calls>[",), APRIEL),
    (("</arg_key><arg_value>",), GLM47),
    (("<arg_key>",), GLM),
    (("<seed:tool_call>",), SEED_OSS),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("functools[",), PHI4_FUNCTOOLS),
    (("<|/tool_call|>",), PHI4),
    (("<|/tool|>",), PHI4),
    (("<|tool_call|>",), GRANITE),
    (("[CALL_ID]", "[ARGS]"), MISTRAL_CALL_ID),
    (("[ARGS]",), MISTRAL_ARGS),
    (("[func_name1(",), PYTHONIC),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|python_tag|>",), LLAMA3),
    (('"parameters": ',), LLAMA3),
)
"""Formats, each with the texts that a chat template contains if its model uses the format. The first row that matches
counts.
"""


def detect_format(template: str) -> ToolFormat | None:
    """Returns the format of a chat template, Hermes if it shows no known one; None if the template has no place for
    tools.
    """
    if "tools" not in template:
        return None
    return shown_format(template) or HERMES


def shown_format(template: str) -> ToolFormat | None:
    """Returns the format whose marks a chat template contains; None if it shows none that is known."""
    return next((found for marks, found in FORMATS if all(mark in template for mark in marks)), None)
