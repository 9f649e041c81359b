"""A checkpoint whose weights are set by hand, so that it writes one of several texts to the letter.

Clients that run tools need a model that calls them. The model here is a Llama of one layer that adds nothing: the next
token depends on the last token alone. Each text is cut into pieces of which every one is a token that occurs nowhere
else, and the chat template chooses a text by writing its first token behind the head of the assistant's message. All
else is as with any model: the prompt is computed, masks apply, and parsers read what was drawn.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from manta.workers.checkpoints.model_folder import resolve_model_folder

HIDDEN_SIZE = 256
PIECE_CHARACTERS = 6
"""Number of characters of a piece. A piece that the vocabulary or an earlier text has is longer."""
CERTAIN = 12.0
"""Scale of the logits: the next token leads by far more than any noise of sampling."""
END = "<|im_end|>"
ARGUMENTS = '", "arguments": '
CALL_END = "}</tool_call>"


class Line(NamedTuple):
    """A text of the model, and when it writes that. The first line of a model that fits is taken."""

    text: str
    asked: str | None = None
    """Words that a message of the user has; None if any will do."""
    tool: str | None = None
    """The name of a tool that the request offers; None if no tool is needed."""
    answers_tool: bool = False
    """True if the line follows the result of a tool, False if it does not."""

    @property
    def condition(self) -> str:
        """The condition as Jinja has it, over names that the template sets."""
        parts = ["answers_tool" if self.answers_tool else "not answers_tool"]
        if self.asked is not None:
            parts.append(f"{json.dumps(self.asked)} in asked.text")
        if self.tool is not None:
            parts.append(f"{json.dumps(self.tool)} in tools | map(attribute='function.name') | list")
        return " and ".join(parts)


def call(name: str, **arguments: Any) -> str:
    """Returns the text of a call in the format of the demo model."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})[:-1]}{CALL_END}"


def pieces(text: str, taken: set[str]) -> list[str]:
    """Returns the pieces of a text, none of which is in `taken`, and adds them there.

    What a grammar of calls forces is one piece at the beginning and at the end of a call, because masks allow only one
    way to write forced text. Raises `ValueError` if the text has no such pieces.
    """
    head = text.find(ARGUMENTS) + len(ARGUMENTS) if ARGUMENTS in text else PIECE_CHARACTERS
    last = len(text) - len(CALL_END) - PIECE_CHARACTERS if text.endswith(CALL_END) else len(text) - PIECE_CHARACTERS
    found: list[str] = []
    begin = 0
    while begin < len(text):
        end = begin + PIECE_CHARACTERS if found else head
        while end < len(text) and (text[begin:end] in taken or end > last):
            end += 1
        found.append(text[begin:end])
        begin = end
    while found[-1] in taken and len(found) > 1:
        end_of_text = found.pop()
        found[-1] += end_of_text
    if taken & set(found) or len(set(found)) < len(found):
        raise ValueError(f"{text!r} has no pieces of its own: say it in other words")
    taken.update(found)
    return found


def write_model(folder: pathlib.Path, lines: Sequence[Line], context: int = 131_072) -> pathlib.Path:
    """Writes a model that says these lines into `folder`, with room for `context` tokens, and returns the folder."""
    demo = pathlib.Path(resolve_model_folder("demo"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder)
    text = (demo / "tokenizer.json").read_text()
    # As one token a mark would have one successor for all calls, so it is written in pieces.
    description = json.loads(text.replace('"<tool_call>"', '"<|begin|>"').replace('"</tool_call>"', '"<|end|>"'))
    ids = dict(description["model"]["vocab"]) | {each["content"]: each["id"] for each in description["added_tokens"]}
    next_ids: dict[int, int] = {}
    taken = set(ids)
    for number, line in enumerate(lines):
        last = 0
        for piece in (_begin(number), *pieces(line.text, taken)):
            ids[piece] = max(ids.values()) + 1
            added = {"id": ids[piece], "content": piece, "special": piece == _begin(number)}
            options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            description["added_tokens"].append(added | options)
            next_ids[last] = ids[piece]
            last = ids[piece]
        next_ids[last] = ids[END]
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(_template(lines))
    config = json.loads((demo / "config.json").read_text())
    vocab_size = (max(ids.values()) + 64) // 64 * 64
    config |= {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab_size, next_ids, ids[END]), folder / "model.safetensors", {"format": "pt"})
    return folder


def _begin(number: int) -> str:
    return f"<|line-{number}|>"


def _template(lines: Sequence[Line]) -> str:
    chosen = "".join(
        "{%- " + ("if" if number == 0 else "elif") + f" {line.condition} -%}}\n{{{{ '{_begin(number)}' }}}}\n"
        for number, line in enumerate(lines)
    )
    return (
        "{%- set tools = tools or [] -%}\n"
        "{%- for tool in tools -%}{{ tool.function | tojson }}\n{% endfor -%}\n"
        "{%- set asked = namespace(text='') -%}\n"
        "{%- for message in messages -%}\n"
        "{%- if message.role == 'user' -%}{%- set asked.text = asked.text + (message.content or '') -%}{%- endif -%}\n"
        "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}\n"
        "{%- for call in message.tool_calls or [] -%}\n"
        "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}\n"
        "{%- endfor -%}{{ '<|im_end|>\n' }}\n{%- endfor -%}\n"
        "{%- set answers_tool = messages[-1].role == 'tool' -%}\n"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}\n" + chosen + "{%- endif -%}{%- endif -%}\n"
    )


def _weights(vocab_size: int, next_ids: dict[int, int], end: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model: a token that begins no piece is followed by `end`."""
    noise = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(vocab_size, HIDDEN_SIZE, generator=noise), dim=-1)
    head = torch.zeros(vocab_size, HIDDEN_SIZE)
    ends = torch.nn.functional.normalize(torch.randn(HIDDEN_SIZE, generator=noise), dim=-1)
    for token in range(vocab_size):
        if token in next_ids:
            head[next_ids[token]] += CERTAIN * embeddings[token]
        else:
            embeddings[token] = ends
    head[end] += CERTAIN * ends
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (64, HIDDEN_SIZE),
        "self_attn.k_proj": (64, HIDDEN_SIZE),
        "self_attn.v_proj": (64, HIDDEN_SIZE),
        "self_attn.o_proj": (HIDDEN_SIZE, 64),
        "mlp.gate_proj": (64, HIDDEN_SIZE),
        "mlp.up_proj": (64, HIDDEN_SIZE),
        "mlp.down_proj": (HIDDEN_SIZE, 64),
    }
    weights = {f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    weights |= {
        f"{layer}{name}.weight": torch.ones(HIDDEN_SIZE) for name in ("input_layernorm", "post_attention_layernorm")
    }
    weights |= {"model.norm.weight": torch.ones(HIDDEN_SIZE)}
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
