"""Text to token ids and back for one model: the tokenizer's files, its chat template and the bytes of every token.

Only the `tokenizers` library reads `tokenizer.json`, so an HTTP process imports neither torch nor transformers; if a
model lacks that file, transformers converts its files. Called by the ingress, by `LLM` and by
`cluster/text/detokenizer.py`. Keeps no state of requests; a caller holds one `TextDecoder` for each sequence.
"""

from __future__ import annotations

import codecs
import datetime
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from workers.sampling_params import SamplingParams

_SPECIAL_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
LONG_TEXT = 20_000
"""Texts of at least this many characters are tokenised in a thread, so that a megabyte does not hold up every
stream.
"""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenizerError(ValueError):
    """The tokenizer's files are missing or unusable; the message says which and what to do."""


class TemplateError(ValueError):
    """The chat template refused the messages; the message is the template's own."""


class TextError(ValueError):
    """A text that is not valid Unicode; the message names the place."""


class TextDecoder(Protocol):
    """Turns a growing sequence of token ids into text, piece by piece."""

    def decode(self, token_ids: Sequence[int], final: bool) -> str:
        """The text that `token_ids` complete. Bytes of an unfinished character are kept for the next call; with `final`
        they become U+FFFD.
        """
        ...


class Tokenizer:
    """The tokenizer of the checkpoint in `folder` (a folder in Hugging Face format, a hub id, or `demo`).

    Raises `TokenizerError` if its files are missing or unreadable.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = _resolve_folder(folder)
        self._config = _read_json(self.folder / "tokenizer_config.json")
        self._fast = self._load()
        self._fast.no_truncation()
        self._fast.no_padding()
        self._add_special_tokens()
        added = self._fast.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        """Number of tokens, added ones included; the model's own vocabulary may be padded beyond it."""
        self._decoding = _decoding_of(json.loads(self._fast.to_str()).get("decoder"))
        self._pieces = _PieceTable(self._fast, self._decoding, skipped=frozenset())
        self._tables: dict[frozenset[int], _PieceTable] = {}
        """Piece tables for `skip_special_tokens`, by the special tokens that are shown all the same."""
        self._texts: dict[int, str] = {}
        self._template_sources = _read_templates(self.folder, self._config)
        self._templates = self._compile_templates()

    # ---- loading -----------------------------------------------------------------------------------------------

    def _load(self) -> FastTokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return self._convert()
        try:
            return FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error

    def _convert(self) -> FastTokenizer:
        """For a model that has only SentencePiece or tiktoken files: transformers converts them."""
        import transformers

        try:
            loaded = transformers.AutoTokenizer.from_pretrained(self.folder, use_fast=True, trust_remote_code=False)
            fast = loaded.backend_tokenizer
        except Exception as error:
            raise TokenizerError(
                f"{self.folder} holds no tokenizer.json, and transformers could not make one: {error}; "
                "give the tokenizer's folder in the option `tokenizer`"
            ) from error
        for role, value in loaded.special_tokens_map.items():
            self._config.setdefault(role, value)
        if loaded.chat_template:
            self._config.setdefault("chat_template", loaded.chat_template)
        return fast

    def _add_special_tokens(self) -> None:
        """Adds tokens that only `tokenizer_config.json` names, as transformers does.

        The `add_bos_token` of that file is ignored if there is a `tokenizer.json`, whose post-processor decides.
        """
        known = {token.content: token for token in self._fast.get_added_tokens_decoder().values()}
        named = set(self.special_tokens.values())
        declared = self._config.get("added_tokens_decoder") or {}
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
            token = _added_token(entry)
            token.special = token.special or token.content in named
            if token.content not in known:
                self._fast.add_tokens([token])
                known[token.content] = token
        extra = self._config.get("additional_special_tokens") or self._config.get("extra_special_tokens") or []
        for value in [*self.special_tokens.values(), *(extra if isinstance(extra, list) else extra.values())]:
            content = value["content"] if isinstance(value, dict) else value
            if content not in known:
                token = AddedToken(content, special=True)
                self._fast.add_tokens([token])
                known[content] = token

    @property
    def special_tokens(self) -> dict[str, str]:
        """A role, such as `eos_token`, to the token's text."""
        found = {}
        for role in _SPECIAL_ROLES:
            value = self._config.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[role] = value
        return found

    # ---- text and tokens ---------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids. Raises `TextError` if `text` holds half of a surrogate pair, which is no character."""
        try:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            _check_unicode(text)
            raise error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each; other threads of Python run meanwhile."""
        try:
            return [each.ids for each in self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except TypeError as error:
            for text in texts:
                _check_unicode(text)
            raise error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, exactly as transformers decodes it. Ids without a token add no text."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text_decoder(
        self,
        skip_special_tokens: bool = True,
        continues_prompt: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> TextDecoder:
        """A decoder for one sequence. Special tokens of `shown_ids` are not skipped.

        SentencePiece tokenizers drop the space in front of a text's first word. Output that continues a prompt keeps
        it, so that prompt and output concatenate; `continues_prompt=False` drops it, as for the answer in a chat.
        """
        if self._decoding.kind == "window":
            return _WindowDecoder(self._fast, skip_special_tokens, self.special_ids - shown_ids)
        table = self._pieces
        if skip_special_tokens:
            table = self._tables.setdefault(
                shown_ids, _PieceTable(self._fast, self._decoding, skipped=self.special_ids - shown_ids)
            )
        return _PieceDecoder(table, "none" if continues_prompt else self._decoding.first)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special tokens included; an unknown id has none."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text; bytes that are no whole character become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def token_to_id(self, token: str) -> int | None:
        return self._fast.token_to_id(token)

    def resolve_bad_words(self, params: SamplingParams) -> SamplingParams:
        """`params` with the token sequences of its `bad_words`, each with and without a space in front."""
        if not params.bad_words:
            return params
        sequences = dict.fromkeys(params.bad_words_token_ids)
        for word in dict.fromkeys(params.bad_words):
            stripped = word.lstrip()
            for text in (stripped or word, f" {stripped}"):
                sequences[tuple(self.encode(text, add_special_tokens=False))] = None
        sequences.pop((), None)
        return msgspec.structs.replace(params, bad_words_token_ids=tuple(sequences))

    # ---- chat --------------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def chat_template_source(self, tools: bool = False) -> str:
        """The source of the chat template; with `tools`, of the template for tools if there is one. Empty without a
        template.
        """
        source = self._template_sources.get("tool_use") if tools else None
        return source or self._template_sources.get("default") or ""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. Raises `TemplateError` if there is no template or it refuses the messages."""
        text = self.render_chat_template(messages, add_generation_prompt, tools, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def render_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, before tokenizing."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError(
                "this model has no chat template; use /v1/completions, or a model whose tokenizer brings one"
            )
        values = {
            **self.special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(values)
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateError(str(error) or type(error).__name__) from error

    def _compile_templates(self) -> dict[str, jinja2.Template]:
        environment = _template_environment()
        try:
            return {name: environment.from_string(source) for name, source in self._template_sources.items()}
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of {self.folder} is no valid Jinja: {error}") from error


# ---- chat templates ------------------------------------------------------------------------------------------------


def has_chat_template(folder: pathlib.Path) -> bool:
    """Whether the model of a folder chats; reads nothing large."""
    return bool(_read_templates(folder, _read_json(folder / "tokenizer_config.json")))


def _read_templates(folder: pathlib.Path, config: dict[str, Any]) -> dict[str, str]:
    """Sources by name, from `chat_template.jinja`, `chat_template.json` or the configuration, in that order."""
    sources: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    if file.is_file():
        sources["default"] = file.read_text(encoding="utf-8")
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[other.stem] = other.read_text(encoding="utf-8")
        return sources
    found = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, str):
        sources["default"] = found
    elif isinstance(found, list):
        sources = {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, dict):
        sources = dict(found)
    return sources


# ---- from tokens to bytes ------------------------------------------------------------------------------------------


class _Decoding(msgspec.Struct, frozen=True):
    """How a tokenizer's decoder makes text, if a table of bytes for each token can express it."""

    kind: str
    """`bytelevel` or `metaspace`; or `window`, for which there is no table: the library decodes a moving window."""
    first: str = "none"
    """What is removed from the beginning of a text: `none`, one `space`, or every space of the first `token`."""
    space: str = "\u2581"
    byte_tokens: bool = False
    """Whether tokens such as `<0x0A>` stand for a byte."""


def _decoding_of(decoder: dict[str, Any] | None) -> _Decoding:
    """Reads the `decoder` of `tokenizer.json`; a composition that the table does not cover decodes by window."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Decoding("bytelevel")
    if kinds == ["Metaspace"]:
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return _Decoding("metaspace", "token" if strips else "none", steps[0]["replacement"])
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        pattern, strip = steps[0]["pattern"].get("String"), steps[-1] if kinds[-1] == "Strip" else None
        strippable = strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
        if pattern and steps[0]["content"] == " " and strippable:
            return _Decoding("metaspace", "space" if strip else "none", pattern, byte_tokens=True)
    return _Decoding("window")


class _PieceTable(dict[int, bytes]):
    """Token id to the bytes that it adds to a text, computed at first use. Skipped and unknown ids add none."""

    def __init__(self, fast: FastTokenizer, decoding: _Decoding, skipped: frozenset[int]) -> None:
        super().__init__()
        self._fast = fast
        self._decoding = decoding
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = b"" if token_id in self._skipped else self._bytes_of(token_id)
        return piece

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._decoding.kind == "bytelevel":
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token holds plain text
                return token.encode()
        if self._decoding.kind == "metaspace":
            match = _BYTE_TOKEN.match(token) if self._decoding.byte_tokens else None
            return bytes([int(match[1], 16)]) if match else token.replace(self._decoding.space, " ").encode()
        return self._fast.decode([token_id], skip_special_tokens=False).encode()


class _PieceDecoder:
    """Joins bytes from a table and decodes UTF-8 incrementally: about 0.2 µs a token.

    Gives the same text as the library, except for the number of U+FFFD if a SentencePiece model emits invalid bytes.
    """

    def __init__(self, table: _PieceTable, first: str) -> None:
        self._table = table
        self._first = first
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token_ids: Sequence[int], final: bool) -> str:
        table = self._table
        pieces = [table[token_id] for token_id in token_ids]
        if self._first != "none":
            self._strip_first(pieces)
        return self._utf8.decode(b"".join(pieces), final)

    def _strip_first(self, pieces: list[bytes]) -> None:
        for index, piece in enumerate(pieces):
            if piece:
                whole_token = self._first == "token"
                pieces[index] = piece.replace(b" ", b"") if whole_token else piece.removeprefix(b" ")
                self._first = "none"
                return


class _WindowDecoder:
    """For decoders in which a token's text depends on its neighbours: decodes the last tokens twice, with and without
    the new ones.
    """

    def __init__(self, fast: FastTokenizer, skip_special_tokens: bool, skipped: frozenset[int]) -> None:
        self._fast = fast
        self._skipped = skipped if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_read = 0
        """Leading tokens of the window whose text was returned already."""

    def decode(self, token_ids: Sequence[int], final: bool) -> str:
        self._window += [token_id for token_id in token_ids if token_id not in self._skipped]
        before = self._fast.decode(self._window[: self._num_read], skip_special_tokens=False)
        text = self._fast.decode(self._window, skip_special_tokens=False)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(before) :]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


# ---- templates -----------------------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; here its body is plain content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A template's namespace without underscore attributes, which would give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace; rename it")


def _template_environment() -> jinja2.Environment:
    """The sandbox in which transformers renders chat templates: a template comes with a model and is not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML; no chat template wants that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


# ---- files ---------------------------------------------------------------------------------------------------------


def _resolve_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """The folder itself if it exists; else the one that the model loader finds for the name."""
    path = pathlib.Path(folder).expanduser()
    if path.is_dir():
        return path
    from workers.checkpoints.model_config import ModelError, resolve_model_folder

    try:
        return resolve_model_folder(str(folder))
    except ModelError as error:
        raise TokenizerError(f"tokenizer: {error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold an object, not a {type(data).__name__}")
    return data


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"{text[error.start]!a} at character {error.start}"
        raise TextError(f"the text holds {lone}, half of a surrogate pair and no character; remove it") from error


def _added_token(entry: dict[str, Any]) -> AddedToken:
    options = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return AddedToken(entry["content"], special=bool(entry.get("special")), **options)
