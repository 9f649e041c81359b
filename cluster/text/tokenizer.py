"""Text to token ids and back for one model, its chat template, and the bytes of every token.

The `tokenizers` library alone reads `tokenizer.json`, so an HTTP process imports neither torch nor transformers. If a
model lacks that file, transformers converts its files. The ingress, `LLM` and `cluster/text/detokenizer.py` call this
module. A tokenizer keeps no state of requests; a caller holds one `TextDecoder` for each sequence.
"""

from __future__ import annotations

import codecs
import functools
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jinja2
import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer_bounds import checked_steps
from manta.cluster.text.tokenizer_files import (
    DeclaredToken,
    TokenizerConfig,
    TokenizerError,
    read_tokenizer_config,
    resolve_folder,
)
from manta.structured.vocabulary import byte_of_character
from manta.workers.checkpoints.memory import GGUF_INDEX, GGUF_NO_TOKENIZER, is_gguf_folder
from manta.workers.checkpoints.stored_files import COPY_AGAIN, MOST_TOKENIZER_BYTES, find_file, read_json, read_text
from manta.workers.sampling_params import SamplingParams

_CONVERTIBLE = ("*.model", "vocab.*", "*.tiktoken", "*.tekken", "tekken.json")
"""Patterns of tokenizer files that transformers converts."""
_OTHER_TOKENIZER = "give the tokenizer's folder in the option `tokenizer`"
_PROBE = "a"
"""A text of which every tokenizer makes a token."""
LONG_TEXT = 20_000
"""Characters from which a text is tokenised in a thread, because a megabyte would delay every stream."""

MOST_UNFINISHED = 64
"""Deltas in a row that may end inside a character, or add no text, before a `WindowDecoder` goes on without them. A
model may write bytes that are no characters forever, and its window would grow with the output.
"""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_BYTE_OF_CHARACTER = byte_of_character()


class TextError(ValueError):
    """A text that is not valid Unicode; the message names the place. `index` is that of the text among those that were
    given together.
    """

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


TextOrPair = str | tuple[str, str]


class TokenSequence(NamedTuple):
    """The tokens of one text or of a pair."""

    token_ids: list[int]
    num_first: int
    """Tokens up to the second text of a pair, with the special tokens around the first one; all of a single text."""

    @classmethod
    def of(cls, encoding: Any) -> TokenSequence:
        """Reads the library's encoding, whose types say which text a token belongs to if the model is told so."""
        types = encoding.type_ids
        return cls(encoding.ids, types.index(1) if 1 in types else len(types))


class TextDecoder(Protocol):
    """Turns a growing sequence of token ids into text, piece by piece."""

    def decode(self, token_ids: Sequence[int], final: bool) -> str:
        """Returns the text that `token_ids` complete. Keeps the bytes of an unfinished character for the next call;
        with `final` they become U+FFFD.
        """
        ...


class Decoding(msgspec.Struct, frozen=True):
    """The way in which a tokenizer's decoder turns tokens into text."""

    kind: str
    """Kind of decoder: `bytelevel` or `metaspace`, which a table of bytes expresses, or `window`, which needs the
    library's decoder.
    """
    first: str = "none"
    """Part that is removed from the beginning of a text: `none`, one `space`, or every space of the first `token`."""
    space: str = "\u2581"
    byte_tokens: bool = False
    """Whether tokens such as `<0x0A>` stand for a byte."""


def decoding_of(decoder: dict[str, Any] | None) -> Decoding:
    """Reads the `decoder` of `tokenizer.json`. A combination of steps that no table expresses is decoded by window."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("bytelevel")
    if kinds == ["Metaspace"]:
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return Decoding("metaspace", "token" if strips else "none", steps[0]["replacement"])
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        pattern = steps[0]["pattern"].get("String")
        strip = steps[-1] if kinds[-1] == "Strip" else None
        strips_one_space = strip is not None and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
        if pattern and steps[0]["content"] == " " and (strip is None or strips_one_space):
            return Decoding("metaspace", "space" if strips_one_space else "none", pattern, byte_tokens=True)
    return Decoding("window")


class PieceTable(dict[int, bytes]):
    """Table of the bytes that each token id adds to a text, computed at first use. Skipped and unknown ids add none."""

    def __init__(self, fast: FastTokenizer, decoding: Decoding, skipped: frozenset[int]) -> None:
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


class PieceDecoder:
    """Joins bytes from a table and decodes UTF-8 incrementally, at about 0.2 µs a token.

    Gives the same text as the library, except for the number of U+FFFD if a SentencePiece model emits invalid bytes.
    """

    def __init__(self, table: PieceTable, first: str) -> None:
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


class WindowDecoder:
    """Decodes the last tokens twice, with and without the new ones, for decoders in which a token's text depends on its
    neighbours.
    """

    def __init__(self, fast: FastTokenizer, skip_special_tokens: bool, skipped: frozenset[int]) -> None:
        self._fast = fast
        self._skipped = skipped if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_read = 0
        """Leading tokens of the window whose text has been returned."""
        self._num_unfinished = 0
        """Deltas in a row after which nothing was returned."""

    def decode(self, token_ids: Sequence[int], final: bool) -> str:
        self._window += [token_id for token_id in token_ids if token_id not in self._skipped]
        if self._num_read == len(self._window):
            return ""
        before = self._fast.decode(self._window[: self._num_read], skip_special_tokens=False)
        text = self._fast.decode(self._window, skip_special_tokens=False)
        is_given_up = self._num_unfinished == MOST_UNFINISHED
        ends_within_a_character = text.endswith("\ufffd") and not (final or is_given_up)
        if (len(text) <= len(before) and not is_given_up) or ends_within_a_character:
            self._num_unfinished += 1
            return ""
        self._num_unfinished = 0
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(before) :]


class Tokenizer:
    """The tokenizer of the checkpoint in `folder` (a folder in Hugging Face format, a hub id, or `demo`).

    Raises `ModelError` if its files are missing or unusable.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = resolve_folder(folder)
        config = read_tokenizer_config(self.folder)
        if find_file(self.folder, "tokenizer.json") is None:
            self._fast, config = self._convert(config)
        else:
            self._fast = self._load()
        self.special_tokens = config.special_tokens
        """Texts of the special tokens by role, such as `eos_token`."""
        self._fast.no_truncation()
        self._fast.no_padding()
        self._add_special_tokens(config)
        steps = checked_steps(self._fast, str(self.folder / "tokenizer.json"))
        added = self._fast.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        """Number of tokens, including added ones; the model's own vocabulary may be padded beyond it."""
        self._decoding = decoding_of(steps.get("decoder"))
        self._pieces = PieceTable(self._fast, self._decoding, skipped=frozenset())
        self._tables: dict[frozenset[int], PieceTable] = {}
        """Piece tables for `skip_special_tokens`, by the special tokens that are shown all the same."""
        self._texts: dict[int, str] = {}
        """Texts that `token_text` has returned, by token id."""
        self.chat_templates = self._load_templates(config.chat_templates)

    @functools.cached_property
    def base_vocab_size(self) -> int:
        """The largest id of a token that was not added, plus 1."""
        return 1 + max(self._fast.get_vocab(with_added_tokens=False).values(), default=-1)

    # ---- loading -----------------------------------------------------------------------------------------------

    def _load(self) -> FastTokenizer:
        text = read_text(self.folder, "tokenizer.json", MOST_TOKENIZER_BYTES)
        try:
            return FastTokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises plain Exception, and a BaseException where it has a fault
            path = self.folder / "tokenizer.json"
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}; {COPY_AGAIN}") from error

    def _convert(self, config: TokenizerConfig) -> tuple[FastTokenizer, TokenizerConfig]:
        """Returns transformers' conversion of SentencePiece or tiktoken files, for a model without `tokenizer.json`.
        The configuration gets what only transformers knows.
        """
        if not any(path for pattern in _CONVERTIBLE for path in self.folder.glob(pattern)):
            is_gguf = is_gguf_folder(self.folder)
            reason = read_json(self.folder, GGUF_INDEX).get(GGUF_NO_TOKENIZER) if is_gguf else None
            raise TokenizerError(f"{reason or f'{self.folder} holds no tokenizer.json'}; {_OTHER_TOKENIZER}")
        import transformers

        from manta.workers.checkpoints.transformers_support import first_sentence

        transformers.utils.logging.set_verbosity_error()  # otherwise it logs at length what the error says
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(self.folder, use_fast=True, trust_remote_code=False)
            fast = loaded.backend_tokenizer
        except Exception as error:
            message = f"{self.folder} holds no tokenizer.json, and transformers could not make one"
            raise TokenizerError(f"{message} ({first_sentence(error)}); {_OTHER_TOKENIZER}") from error
        named = {role: text for role, text in loaded.special_tokens_map.items() if isinstance(text, str)}
        templates = config.chat_templates
        if isinstance(loaded.chat_template, str) and loaded.chat_template:
            templates = templates or {"default": loaded.chat_template}
        complete = msgspec.structs.replace(
            config, special_tokens=named | config.special_tokens, chat_templates=templates
        )
        return fast, complete

    def _add_special_tokens(self, config: TokenizerConfig) -> None:
        """Adds tokens that only `tokenizer_config.json` names, as transformers does.

        The `add_bos_token` of that file is ignored if there is a `tokenizer.json`, whose post-processor decides.
        """
        known = {token.content: token for token in self._fast.get_added_tokens_decoder().values()}
        named = set(self.special_tokens.values())
        for entry in config.declared:
            token = _added_token(entry)
            token.special = token.special or token.content in named
            if token.content not in known:
                self._fast.add_tokens([token])
                known[token.content] = token
        for content in (*self.special_tokens.values(), *config.extra):
            if content not in known:
                token = AddedToken(content, special=True)
                self._fast.add_tokens([token])
                known[content] = token

    def _load_templates(self, sources: dict[str, str]) -> ChatTemplates:
        try:
            return ChatTemplates(sources)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of {self.folder} is no valid Jinja: {error}") from error

    # ---- text and tokens ---------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the text's token ids. Raises `TextError` if `text` holds a lone surrogate."""
        try:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            _check_unicode(text)
            raise error

    def leading_special_ids(self) -> list[int]:
        """Returns the special tokens that `encode` puts in front of a text, such as the beginning of a sequence."""
        plain, whole = self.encode(_PROBE, add_special_tokens=False), self.encode(_PROBE)
        return whole[: whole.index(plain[0])]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of each text, as `encode` does; other Python threads run meanwhile."""
        try:
            return [each.ids for each in self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except TypeError as error:
            for index, text in enumerate(texts):
                _check_unicode(text, index)
            raise error

    def sequences(self, texts: Sequence[TextOrPair], add_special_tokens: bool = True) -> list[TokenSequence]:
        """Returns the tokens of texts, or of pairs of texts in one sequence each, as models that pool read them.
        Other Python threads run meanwhile. Raises `TextError`.
        """
        try:
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            for index, text in enumerate(texts):
                for part in (text,) if isinstance(text, str) else text:
                    _check_unicode(part, index)
            raise error
        return [TokenSequence.of(encoding) for encoding in encodings]

    def cut_sequence(
        self,
        text: TextOrPair,
        room: int,
        side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
        num_kept_characters: int = 0,
        most_of_second: int | None = None,
    ) -> TokenSequence | None:
        """Returns the tokens of a text without those beyond `room`, cut at the end (`right`) or at the beginning; None
        if there is no room for a token of it. Special tokens stay, the first `num_kept_characters` too. Of a pair only
        the second text is cut, to at most `most_of_second` tokens.
        """
        if num_kept_characters and side == "left" and isinstance(text, str):
            return self._cut_after(text, room, add_special_tokens, num_kept_characters)
        texts = [text] if isinstance(text, str) else text
        *before, last = [self._fast.encode(part, add_special_tokens=False) for part in texts]
        num_special = self._fast.num_special_tokens_to_add(bool(before)) if add_special_tokens else 0
        num_kept = len(self.encode(texts[0][:num_kept_characters], False)) if num_kept_characters else 0
        room -= num_special + sum(map(len, before))
        if room <= num_kept:
            return None
        if before and most_of_second is not None:
            room = min(room, most_of_second)
        last.truncate(room, direction=side)
        first, second = (before[0], last) if before else (last, None)
        return TokenSequence.of(self._fast.post_process(first, second, add_special_tokens=add_special_tokens))

    def _cut_after(self, text: str, room: int, add_special_tokens: bool, num_kept: int) -> TokenSequence | None:
        """Returns a text without what follows its first `num_kept` characters, as much as must go."""
        start = num_kept
        while start < len(text):
            sequence = TokenSequence.of(
                self._fast.encode(text[:num_kept] + text[start:], add_special_tokens=add_special_tokens)
            )
            excess = len(sequence.token_ids) - room
            if excess <= 0:
                return sequence
            spans = self._fast.encode(text[start:], add_special_tokens=False).offsets
            start += max(1, spans[min(excess, len(spans)) - 1][1]) if spans else len(text)
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence, exactly as transformers decodes it. Ids without a token add no text."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text_decoder(
        self,
        skip_special_tokens: bool = True,
        continues_prompt: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> TextDecoder:
        """Returns a decoder for one sequence. Special tokens in `shown_ids` are not skipped.

        SentencePiece tokenizers drop the space in front of a text's first word. Output that continues a prompt keeps
        it, so that prompt and output concatenate; `continues_prompt=False` drops it, as for the answer in a chat.
        """
        if self._decoding.kind == "window":
            return WindowDecoder(self._fast, skip_special_tokens, self.special_ids - shown_ids)
        table = self._pieces
        if skip_special_tokens:
            if shown_ids not in self._tables:
                skipped = self.special_ids - shown_ids
                self._tables[shown_ids] = PieceTable(self._fast, self._decoding, skipped)
            table = self._tables[shown_ids]
        return PieceDecoder(table, "none" if continues_prompt else self._decoding.first)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for, including special tokens; none for an unknown id."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """Returns a token's bytes as text; bytes that form no complete character become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the `token_text` of each token."""
        return [self.token_text(token_id) for token_id in token_ids]

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of the token whose name is `token`; None if there is none."""
        return self._fast.token_to_id(token)

    def resolve_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with the token sequences of its `bad_words`, each with and without a leading space."""
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
        return bool(self.chat_templates)

    def chat_template_source(self, tools: bool = False) -> str:
        """Returns the source of the chat template; with `tools`, that of the template for tools if there is one. Empty
        without a template.
        """
        return self.chat_templates.source(tools)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation. Raises `TemplateError` if there is no template or it refuses the
        messages.
        """
        text = self.render_chat_template(messages, add_generation_prompt, tools, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def render_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Returns the text of a conversation. Raises `TemplateError` if there is no template or it refuses the
        messages.
        """
        values = {
            **self.special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        return self.chat_templates.render(tools, values)


def _check_unicode(text: str, index: int = 0) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"{text[error.start]!a} at character {error.start}"
        cause = f"the text holds {lone}, half of a surrogate pair and no character; remove it"
        raise TextError(cause, index) from error


def _added_token(entry: DeclaredToken) -> AddedToken:
    return AddedToken(entry.content, special=entry.is_special, **entry.options)
