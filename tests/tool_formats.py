"""How models write calls in each format, written down by hand, and tokenizers that have the formats' special tokens."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from manta.cluster.chat import tool_formats as formats
from manta.cluster.chat.tool_formats import ToolFormat
from manta.workers.checkpoints.model_folder import resolve_model_folder

Call = tuple[str, dict[str, Any]]
"""The name and the arguments of a call."""

MARKS = (
    *("<|tool_call|>", "<|/tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<seed:tool_call>", "</seed:tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
)
"""Special tokens of models that write the formats."""
TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Tokens that GLM's tokenizer has, and which are not special."""
LATER_MARKS = (
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>", "<minimax:tool_call>", "</minimax:tool_call>"),
)
"""Further special tokens, behind the others so that these keep their ids."""


def _function(name: str, properties: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    required = [key for key in properties or {} if key not in ("when", "note", "more")]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    parameters = None if properties is None else {**schema, **more}
    return {
        "type": "function",
        "function": {"name": name, **({} if parameters is None else {"parameters": parameters})},
    }


_SHORT = {"type": "string", "maxLength": 6}
TOOLS = [
    _function(
        "log",
        {
            "text": {"type": "string"},
            "level": {"type": "integer", "minimum": 1, "maximum": 9},
            "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        },
    ),
    _function(
        "find",
        {
            "city": {"enum": ["Rome", "", "São Paulo <north>"], "contentMediaType": "text/plain"},
            "code": {"type": "string", "pattern": "^[a-z<]{2,3}-[0-9]/x?$"},
            "note": {"type": ["string", "null", "boolean"], "maxLength": 4},
            "more": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
        },
        **{"$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}},
    ),
    _function("set_on", {"on": {"type": "boolean"}, "level": {"anyOf": [{"type": "integer"}, _SHORT]}}),
    _function("stop_all", {}),
    _function("tag", {"id": {"const": 7}}, additionalProperties={"type": "string", "minLength": 1, "maxLength": 3}),
    _function("mix", {"either": {"anyOf": [_SHORT, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]}}),
]
"""Tools whose schemas ask for what formats find hard: raw strings with patterns, null beside strings, references."""


def tokenizer_folder(folder: pathlib.Path, template: str, has_marks: bool = True) -> pathlib.Path:
    """Writes into `folder` the demo model's tokenizer, with the special tokens of all formats if it `has_marks`."""
    demo = pathlib.Path(resolve_model_folder("demo"))
    shutil.copy(demo / "tokenizer_config.json", folder)
    description = json.loads((demo / "tokenizer.json").read_text())
    if has_marks:
        known = max([*description["model"]["vocab"].values(), *(each["id"] for each in description["added_tokens"])])
        options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for number, mark in enumerate([*MARKS, *TAGS, *LATER_MARKS], known + 1):
            added = {"id": number, "content": mark, "special": mark not in TAGS, **options}
            description["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def template_of(form: ToolFormat) -> str:
    """A chat template by which the format is recognised; it writes the calls of a conversation as the format has it."""
    marks = next(marks for marks, found in formats.FORMATS if found is form)
    more = ["<|start|>assistant<|channel|>analysis<|message|>"] if form.is_channel else []
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.id }} {{ call.function.name }} "
        "{{ call.function.arguments | tojson }}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if tools %}{% if false %}"
        + "".join("{{ '" + mark.replace("'", "") + "' }}" for mark in [*marks, *more])
        + "{% endif %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(name: str, arguments: str) -> Callable[[Sequence[Call]], list[str]]:
    return lambda calls: [_json({name: call, arguments: given}) for call, given in calls]


_HERMES = _objects("name", "arguments")


def _list(begin: str, end: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{begin}[{', '.join(_HERMES(calls))}]{end}"


def _cohere(calls: Sequence[Call]) -> str:
    written = [
        _json({"tool_call_id": str(index), "tool_name": name, "parameters": given})
        for index, (name, given) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(written) + "\n]<|END_ACTION|>"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    written = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for index, (name, given) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        arguments = "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in given.items())
        written.append(f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>")
    return "\n".join(written)


def _seed_oss(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        arguments = "".join(f"<parameter={key}>{_raw(value)}</parameter>\n" for key, value in given.items())
        written.append(f"<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>")
    return "\n".join(written)


def _glm(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        arguments = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in given.items()
        )
        written.append(f"<tool_call>{name}\n{arguments}</tool_call>")
    return "\n".join(written)


def _glm47(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        arguments = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_raw(value)}</arg_value>" for key, value in given.items()
        )
        written.append(f"<tool_call>{name}{arguments}</tool_call>")
    return "".join(written)


def _minimax(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        arguments = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in given.items())
        written.append(f'<invoke name="{name}">\n{arguments}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def _delimited(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_delimited(item)}' for key, item in value.items())}}}"
    return f"[{','.join(map(_delimited, value))}]" if isinstance(value, list) else _json(value)


def _gemma4(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_delimited(given)}<tool_call|>" for name, given in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    words = {"true": "True", "false": "False", "null": "None"}
    written = []
    for name, given in calls:
        arguments = [f"{key}={words.get(_json(value), _json(value))}" for key, value in given.items()]
        written.append(f"{name}({', '.join(arguments)})")
    return f"[{', '.join(written)}]"


def _gpt_oss(calls: Sequence[Call]) -> str:
    ((name, given),) = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"


WRITERS: dict[ToolFormat, Callable[[Sequence[Call]], str]] = {
    formats.HERMES: lambda calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _HERMES(calls)),
    formats.MISTRAL: _list("[TOOL_CALLS]"),
    formats.MISTRAL_ARGS: lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls),
    formats.MISTRAL_CALL_ID: lambda calls: "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4{index}[ARGS]{_json(given)}" for index, (name, given) in enumerate(calls)
    ),
    formats.LLAMA3: lambda calls: _objects("name", "parameters")(calls)[0],
    formats.PYTHONIC: _pythonic,
    formats.GRANITE: _list("<|tool_call|>"),
    formats.PHI4: _list("<|tool_call|>", "<|/tool_call|>"),
    formats.PHI4_FUNCTOOLS: _list("functools"),
    formats.COHERE: _cohere,
    formats.QWEN3_CODER: _qwen3_coder,
    formats.SEED_OSS: _seed_oss,
    formats.GLM: _glm,
    formats.DEEPSEEK_V3: _deepseek_v3,
    formats.DEEPSEEK_V31: _deepseek_v31,
    formats.KIMI_K2: _kimi,
    formats.GPT_OSS: _gpt_oss,
    formats.NEMOTRON: _list("<TOOLCALL>", "</TOOLCALL>"),
    formats.APRIEL: _list("<tool_calls>", "</tool_calls>"),
    formats.LFM2: lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
    formats.GEMMA4: _gemma4,
    formats.GLM47: _glm47,
    formats.MINIMAX: _minimax,
}
"""A text for each format, as the model's chat template writes it."""
