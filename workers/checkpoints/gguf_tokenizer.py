"""Makes the tokenizer of a GGUF file in Hugging Face's format, so that it splits and merges as llama.cpp does.

`gguf_file.py` calls it once for each file. What llama.cpp does: `src/llama-vocab.cpp` of
https://github.com/ggml-org/llama.cpp. Byte-level BPE (`gpt2`), SentencePiece's BPE (`llama`), and Gemma 4's BPE of
characters (`gemma4`) are served.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.gguf_ends import end_names
from manta.workers.checkpoints.gguf_header import GgufArray, read_gguf_array
from manta.workers.checkpoints.gguf_splits import REFUSED, SPLITTINGS, Splitting
from manta.workers.models.raw_config import RawConfig, RawValue

logger = logger_of(__name__)

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens, as `tokenizer.ggml.token_type` numbers them."""
_SPACE = "▁"
_OF_LINES = r"[^\n]+|\n+"
"""The splitting of a text whose merges are those of characters."""
_USUAL_SPM_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of SentencePiece's special tokens in a file that does not say them."""
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Roles of special tokens in GGUF's keys, and in `tokenizer_config.json`."""
_ALWAYS_USER_DEFINED = "<|channel|> <|message|> <|start|> <|constrain|>"
"""Tokens that llama.cpp takes for user-defined ones, whatever type a file gives them."""
_TEMPLATE = "tokenizer.chat_template"
_HTML_END = "</s>"
"""A token that ends answers in some vocabularies, and is text in others."""
_FILL_IN_MARKS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
"""Tokens that llama.cpp takes for control tokens if the file has no key for them."""
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""All other control tokens of Phi 3 take the spaces after them."""


class _Vocabulary(NamedTuple):
    ids: dict[str, int]
    """The ids of all tokens, in order."""
    names: list[str]
    types: list[int]


def write_tokenizer(path: pathlib.Path, values: RawConfig, num_rows: int, folder: pathlib.Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template of the file `path` into `folder`.

    `values` is the file's metadata and `num_rows` the number of rows of its embedding. Raises `ModelError` naming the
    key if the tokenizer is damaged or not served.
    """
    kind = values[_KEY + "model"].one_of("gpt2", "llama", "gemma4")
    vocabulary = _read_vocabulary(path, values, num_rows)
    if kind == "llama":
        splitting = Splitting((), adds_bos=True)
        special = _special_ids(values, vocabulary, _USUAL_SPM_IDS)
        tokenizer = _sentencepiece(path, values, vocabulary, special.get("unknown"))
    elif kind == "gemma4":
        splitting = Splitting((), adds_bos=True)
        special = _special_ids(values, vocabulary, {})
        tokenizer = _of_characters(vocabulary, _merges(path, values, vocabulary), special.get("unknown"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_OF_LINES), "isolated")
    else:
        splitting = _splitting(values[_KEY + "pre"])
        special = _special_ids(values, vocabulary, {})
        tokenizer = _byte_level(path, values, vocabulary, splitting)
    tokenizer.add_tokens(list(_added_tokens(vocabulary, values)))
    _surround(tokenizer, values, vocabulary, special, splitting.adds_bos)
    roles = {_ROLES[role]: vocabulary.names[token_id] for role, token_id in special.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= roles | _named_templates(values)
    template = values[_TEMPLATE].text("")
    if template and "chat_template" not in config:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))


def _named_templates(values: RawConfig) -> dict[str, Any]:
    """Returns the entry of `tokenizer_config.json` with the chat templates of a file that has several, such as
    `tool_use` for requests with tools; nothing if it has one.
    """
    others = sorted(key for key in values.values if key.startswith(f"{_TEMPLATE}."))
    named = {"default": values[_TEMPLATE], **{key.removeprefix(f"{_TEMPLATE}."): values[key] for key in others}}
    found = [{"name": name, "template": text} for name, value in named.items() if (text := value.text(""))]
    return {"chat_template": found} if others else {}


def _read_vocabulary(path: pathlib.Path, values: RawConfig, num_rows: int) -> _Vocabulary:
    tokens = values[_KEY + "tokens"]
    names = [name or f"[EMPTY_{index}]" for index, name in enumerate(_items(path, tokens, str))]
    if not 0 < len(names) <= num_rows:
        raise tokens.refused(f"1 to {num_rows} texts, one for each row of the embedding")
    ids = {name: index for index, name in enumerate(names)}
    if len(ids) < len(names):
        twice = next(name for index, name in enumerate(names) if ids[name] != index)
        raise tokens.refused(f"different texts ({twice!r} is there twice)")
    kinds = values[_KEY + "token_type"]
    types = [_NORMAL] * len(names) if kinds.value is None else _items(path, kinds, int)
    if len(types) < len(names):
        raise kinds.refused(f"{len(names)} numbers, one for each token")
    return _Vocabulary(ids, names, types[: len(names)])


def _items(path: pathlib.Path, value: RawValue, *kinds: type) -> list[Any]:
    """Returns the items of an array, which all are of one of these kinds."""
    items = read_gguf_array(path, value.value) if isinstance(value.value, GgufArray) else None
    if items is None or (items and type(items[0]) not in kinds):
        raise value.refused(f"a list of {'texts' if str in kinds else 'numbers'}")
    return items


def _special_ids(values: RawConfig, vocabulary: _Vocabulary, usual: dict[str, int]) -> dict[str, int]:
    """Returns the ids of the roles that the file names. A padding token outside the vocabulary is left out, as in many
    published files: nothing is padded.
    """
    last, found = len(vocabulary.names) - 1, {}
    for role in _ROLES:
        value = values[f"{_KEY}{role}_token_id"]
        if value.value is None and usual.get(role, last + 1) <= last:
            found[role] = usual[role]
        elif value.value is not None and (role != "padding" or value.whole(least=0, most=2**32 - 1) <= last):
            found[role] = value.whole(least=0, most=last)
    return found


def _splitting(name: RawValue) -> Splitting:
    if name.value is None:
        logger.warning("%s has no %s; words are split as llama.cpp does without it", name.file, name.key)
    spelled = name.text("default")
    if spelled not in SPLITTINGS:
        reason = f" ({spelled} {REFUSED[spelled]})" if spelled in REFUSED else ""
        raise name.refused(f"a splitting that is served{reason}")
    return SPLITTINGS[spelled]


def _merges(path: pathlib.Path, values: RawConfig, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that the file merges, the first ones first."""
    value = values[_KEY + "merges"]
    merges = []
    for index, merge in enumerate(_items(path, value, str)):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocabulary.ids.keys():
            raise value.refused(f"pairs of tokens that make a token ({merge!r}, number {index}, is none)")
        merges.append((left, right))
    return merges


def _byte_level(path: pathlib.Path, values: RawConfig, vocabulary: _Vocabulary, splitting: Splitting) -> Tokenizer:
    merges = _merges(path, values, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=splitting.ignores_merges))
    steps: list[pre_tokenizers.PreTokenizer] = [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if missing := set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.ids.keys():
        # Such a byte has no token. Without this step, the library would merge the tokens around it.
        steps.append(pre_tokenizers.Split(Regex(f"[{''.join(map(re.escape, sorted(missing)))}]"), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: pathlib.Path, values: RawConfig, vocabulary: _Vocabulary, unknown_id: int | None) -> Tokenizer:
    value = values[_KEY + "scores"]
    scores = _items(path, value, float, int)
    if len(scores) < len(vocabulary.names) or not all(map(math.isfinite, scores)):
        raise value.refused(f"{len(vocabulary.names)} finite numbers, one for each token")
    has_prefix = values[_KEY + "add_space_prefix"].flag(True)
    return _of_characters(vocabulary, _merges_by_score(vocabulary, scores), unknown_id, has_prefix)


def _of_characters(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], unknown_id: int | None, has_prefix: bool = False
) -> Tokenizer:
    """Returns a tokenizer whose spaces are characters of tokens, and that spells other characters as bytes.
    `has_prefix` says whether a text begins with one more space.
    """
    unknown = None if unknown_id is None else vocabulary.names[unknown_id]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that make a piece, those of the best pieces first."""
    pairs = []
    for name, token_id in vocabulary.ids.items():
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in vocabulary.ids and right in vocabulary.ids:
                pairs.append((-scores[token_id], left, right))
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]


def _added_tokens(vocabulary: _Vocabulary, values: RawConfig) -> Iterator[AddedToken]:
    """Yields the tokens that are found in a text before it is split."""
    model_name = values["general.name"].value
    is_phi3 = isinstance(model_name, str) and any(part in model_name.lower() for part in _PHI3_NAMES)
    kinds = _kinds(vocabulary, values)
    for name, kind in zip(vocabulary.names, kinds, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            yield AddedToken(
                name,
                special=kind != _USER_DEFINED,
                normalized=False,
                rstrip=is_phi3 and name not in _PHI3_UNSTRIPPED,
            )


def _kinds(vocabulary: _Vocabulary, values: RawConfig) -> list[int]:
    """Returns the types of the tokens, corrected by their names as llama.cpp does for files of old converters."""
    kinds = list(vocabulary.types)
    ends = end_names(vocabulary.ids)
    control = set(ends)
    for role, names in _FILL_IN_MARKS.items():
        if values[f"{_KEY}{role}_token_id"].value is None:
            control |= set(names.split())
    texts = {_HTML_END} - ends if _HTML_END in vocabulary.ids else set[str]()
    corrected = ((control, _CONTROL), (set(_ALWAYS_USER_DEFINED.split()), _USER_DEFINED), (texts, _NORMAL))
    for these, kind in corrected:
        for name in these & vocabulary.ids.keys():
            kinds[vocabulary.ids[name]] = kind
    return kinds


def _surround(
    tokenizer: Tokenizer, values: RawConfig, vocabulary: _Vocabulary, special: dict[str, int], adds_bos: bool
) -> None:
    """Makes the tokenizer put the BOS and the EOS token around a text where the file says so."""
    sides: dict[str, list[str]] = {"bos": [], "eos": []}
    for role, usual in (("bos", adds_bos), ("eos", False)):
        adds = values[f"{_KEY}add_{role}_token"]
        if adds.flag(usual):
            if role not in special:
                raise values[f"{_KEY}{role}_token_id"].refused(f"the id of a token, because {adds.key} asks for one")
            sides[role].append(vocabulary.names[special[role]])
    single, second = [*sides["bos"], "$A", *sides["eos"]], [*sides["bos"], "$B", *sides["eos"]]
    if len(single) > 1:
        names = dict.fromkeys(sides["bos"] + sides["eos"])
        used = [(name, vocabulary.ids[name]) for name in names]
        tokenizer.post_processor = processors.TemplateProcessing(single, single + second, used)
