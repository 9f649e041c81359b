"""The tokens of a GGUF file are those of llama.cpp, for every name of a splitting and both kinds of vocabularies; a
tokenizer that is damaged or unknown is refused by name.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers

from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import TokenizerError
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.gguf_splits import REFUSED, SPLITTINGS
from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import CORPUS, checkpoint
from tests.gguf_files import Vocabulary, write_gguf

pytest.importorskip("xllamacpp", reason="no wheel for this platform")

from tests.llamacpp import LlamaCppTokenizer

VOCAB_SIZE = 1_600
FEW, MANY = 200, 10_000
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ONE_OF_EACH = sorted({splitting: name for name, splitting in SPLITTINGS.items()}.values())
"""A name of each splitting."""
TEXT = (
    "the of don't I'LL we've HELLO World iPhone naïve Größe 東京 日本語 カタカナ 한국어 русский العربية हिन्दी ภาษาไทย "
    "1234567 3.14 1,000,000 0x1F def return {}; == != ++ --> http://a.b/c?d=e&f=1 __init__ [INST] <sentinel:12> "
    "IMGIMGABZ 🙂 👨\u200d👩\u200d👧 e\u0301 ﬁ \u017f 'S '\u017f ½ ² Ⅷ \uff11\uff12\uff13 ٣٤٥ «q» … — 。 、 \uff01"
)
WORDS = TEXT.split()
SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\t",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\x0b",
    "\x85",
    " " * 17,
]


@functools.cache
def characters() -> list[str]:
    """All assigned characters of a Unicode version that is older than those of the two libraries."""
    return [chr(code) for code in range(1, 0x110000) if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")]


def mixed_texts(count: int, seed: int, words: Sequence[str] = WORDS) -> Iterator[str]:
    """Yields texts in which words, numbers, punctuation and spaces of many scripts meet in every order."""
    draw = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 12)):
            kind = draw.random()
            if kind < 0.45:
                parts.append(draw.choice(words))
            elif kind < 0.75:
                parts.append(draw.choice(SPACES) * draw.randint(1, 2))
            elif kind < 0.85:
                parts.append("".join(draw.choice(characters()) for _ in range(draw.randint(1, 4))))
            elif kind < 0.95:
                parts.append("".join(chr(draw.randint(32, 126)) for _ in range(draw.randint(1, 8))))
            else:
                parts.append(draw.choice("a1 ▁-=.") * draw.randint(1, 20))
        yield "".join(parts)


@pytest.fixture(scope="module")
def byte_level() -> Vocabulary:
    """A vocabulary with merges across all borders of words, so that each border shows in the tokens."""
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 20, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(mixed_texts(600, seed=1), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    special = ["<s>", "</s>", "<|im_end|>", "<|unmarked|>", "<tool>", "    ", "<mask>"]
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, NORMAL, NORMAL, USER_DEFINED, USER_DEFINED, CONTROL]
    return Vocabulary(tokens + special, types, merges=[" ".join(pair) for pair in model["merges"]])


class Pieces(NamedTuple):
    tokens: list[str]
    types: list[int]
    merges: list[str]


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    """Pieces of all lengths, and the bytes of characters that are no pieces."""
    trained = FastTokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 400, limit_alphabet=400, show_progress=False)
    trained.train_from_iterator((text.replace(" ", "▁") for text in mixed_texts(600, seed=2)), trainer)
    ids = trained.get_vocab()
    learnt = sorted(ids.keys() - {"<s>"}, key=lambda piece: ids[piece])
    marks = ["<unk>", "<s>", "</s>", "<tool>"]
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(learnt)]
    return Pieces(tokens, types, [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]])


@pytest.fixture(scope="module")
def sentencepiece(pieces: Pieces) -> Vocabulary:
    return Vocabulary(pieces.tokens, pieces.types, scores=[-float(index) for index in range(len(pieces.tokens))])


def gguf_of(at: pathlib.Path, vocabulary: Vocabulary, **metadata: Any) -> pathlib.Path:
    folder = checkpoint("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=1, hidden_size=64)
    return write_gguf(folder, at / "model.gguf", lambda name: "F32", vocabulary=vocabulary, **metadata)


def assert_same(path: pathlib.Path, texts: Iterator[str]) -> None:
    found, expected = Tokenizer(path), LlamaCppTokenizer(path)
    try:
        for text in texts:
            assert found.encode(text) == expected.encode(text), text
    finally:
        expected.close()


@pytest.mark.few(10)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_words_are_split_as_llama_cpp_does(name: str, byte_level: Vocabulary, tmp_path: pathlib.Path) -> None:
    assert_same(gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=name), mixed_texts(FEW, seed=3))


@pytest.mark.prove
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_words_of_many_texts_are_split_as_llama_cpp_does(
    name: str, byte_level: Vocabulary, tmp_path: pathlib.Path
) -> None:
    assert_same(gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=name), mixed_texts(MANY, seed=4))


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_every_name_means_what_it_means_to_llama_cpp(name: str, byte_level: Vocabulary, tmp_path: pathlib.Path) -> None:
    assert_same(gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=name), mixed_texts(FEW, seed=10))


SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|unmarked|>", "<tool>", "    ", "<mask>", "<unk>"]


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "tekken"])
def test_special_tokens_in_a_text_are_those_of_llama_cpp(
    name: str, byte_level: Vocabulary, tmp_path: pathlib.Path
) -> None:
    path = gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=name)
    assert_same(path, mixed_texts(FEW, seed=5, words=[*SPECIAL, "word", "12"]))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"tokenizer__ggml__add_space_prefix": False},
        {"tokenizer__ggml__add_bos_token": False},
        {"tokenizer__ggml__add_eos_token": True},
        {"tokenizer__ggml__bos_token_id": None},
    ],
    ids=str,
)
def test_sentencepiece_is_that_of_llama_cpp(metadata: dict, sentencepiece: Vocabulary, tmp_path: pathlib.Path) -> None:
    path = gguf_of(tmp_path, sentencepiece, **metadata)
    assert_same(path, mixed_texts(FEW, seed=6, words=[*WORDS, *SPECIAL]))


@pytest.mark.prove
def test_sentencepiece_of_many_texts_is_that_of_llama_cpp(sentencepiece: Vocabulary, tmp_path: pathlib.Path) -> None:
    assert_same(gguf_of(tmp_path, sentencepiece), mixed_texts(MANY, seed=7, words=[*WORDS, *SPECIAL]))


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.prove)])
def test_merges_of_characters_are_those_of_llama_cpp(count: int, pieces: Pieces, tmp_path: pathlib.Path) -> None:
    vocabulary = Vocabulary(pieces.tokens, pieces.types, merges=pieces.merges)
    metadata = {"tokenizer__ggml__model": "gemma4", "tokenizer__ggml__unknown_token_id": 0}
    path = gguf_of(tmp_path, vocabulary, **metadata)
    assert_same(path, mixed_texts(count, seed=12, words=[*WORDS, *SPECIAL]))
    tokenizer = Tokenizer(path)
    for text in (*CORPUS, " indented"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("adds", [None, True, False])
@pytest.mark.parametrize("name", ["qwen2", "llama-bpe"])
def test_the_first_and_last_tokens_are_those_of_llama_cpp(
    name: str, adds: bool | None, byte_level: Vocabulary, tmp_path: pathlib.Path
) -> None:
    metadata = {"tokenizer__ggml__add_bos_token": adds, "tokenizer__ggml__add_eos_token": adds}
    path = gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=name, **metadata)
    assert_same(path, iter(["", "hello", "<s>hello</s>"]))


def test_a_file_without_a_name_is_split_as_llama_cpp_does(byte_level: Vocabulary, tmp_path: pathlib.Path) -> None:
    assert_same(gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=None), mixed_texts(FEW, seed=8))


def test_control_tokens_of_phi_3_take_the_spaces_after_them(sentencepiece: Vocabulary, tmp_path: pathlib.Path) -> None:
    tokens, types = [*sentencepiece.tokens, "<|endoftext|>"], [*sentencepiece.types, CONTROL]
    vocabulary = Vocabulary(tokens, types, scores=[*(sentencepiece.scores or []), -9_999.0])
    path = gguf_of(tmp_path, vocabulary, general__name="Phi-3 mini")
    texts = [f"{mark}{space}hello" for mark in tokens[:4] + tokens[-1:] for space in ("", " ", "  ", " \n\t ")]
    assert_same(path, iter(texts))


@pytest.mark.parametrize("has_prefix", [True, False])
def test_the_text_of_the_tokens_is_the_text(
    has_prefix: bool, sentencepiece: Vocabulary, tmp_path: pathlib.Path
) -> None:
    tokenizer = Tokenizer(gguf_of(tmp_path, sentencepiece, tokenizer__ggml__add_space_prefix=has_prefix))
    for text in (*CORPUS, " indented"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_scores_may_be_whole_numbers(sentencepiece: Vocabulary, tmp_path: pathlib.Path) -> None:
    scores: list[Any] = [int(score) for score in sentencepiece.scores or []]
    assert_same(gguf_of(tmp_path, sentencepiece._replace(scores=scores)), mixed_texts(20, seed=11))


@pytest.mark.parametrize("name", [*REFUSED, "brand-new", ""])
def test_an_unknown_splitting_is_refused_by_name(name: str, byte_level: Vocabulary, tmp_path: pathlib.Path) -> None:
    path = gguf_of(tmp_path, byte_level, tokenizer__ggml__pre=name)
    with pytest.raises(TokenizerError) as refusal:
        Tokenizer(path)
    words = f"tokenizer.ggml.pre must be a splitting that is served{f' ({name} ' if name in REFUSED else ''}"
    assert words in str(refusal.value)
    assert str(refusal.value).endswith(f', not "{name}"; give the tokenizer\'s folder in the option `tokenizer`')


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "whitespace", "hybriddna", "none", 7])
def test_another_kind_of_vocabulary_is_refused_by_name(
    kind: object, byte_level: Vocabulary, tmp_path: pathlib.Path
) -> None:
    path = gguf_of(tmp_path, byte_level, tokenizer__ggml__model=kind)
    with pytest.raises(
        TokenizerError, match=f"tokenizer.ggml.model must be gpt2 or llama or gemma4, not {json.dumps(kind)}"
    ):
        Tokenizer(path)


def test_a_file_may_have_a_chat_template_for_tools(byte_level: Vocabulary, tmp_path: pathlib.Path) -> None:
    templates: dict[str, Any] = {
        "tokenizer__chat_template": "plain",
        "tokenizer__chat_template__tool_use": "{{ tools }}",
    }
    for number, given in enumerate([templates, {"tokenizer__chat_template": "plain"}]):
        (tmp_path / str(number)).mkdir()
        found = Tokenizer(gguf_of(tmp_path / str(number), byte_level, tokenizer__ggml__pre="gpt-2", **given))
        sources = found.chat_template_source(), found.chat_template_source(tools=True)
        assert sources == ("plain", given.get("tokenizer__chat_template__tool_use", "plain"))


# ---- the ends of answers -------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[list[str], int | str, list[str]]] = {
    "none by name": ([], 5, []),
    "Qwen 2.5": (["<|endoftext|>", "<|im_end|>"], "<|im_end|>", ["<|endoftext|>"]),
    "Phi 3": (["<|endoftext|>", "<|end|>", "<|user|>"], "<|endoftext|>", ["<|end|>"]),
    "Llama 3.1": (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>"]),
    "gpt-oss": (["<|return|>", "<|end|>", "<|call|>", "<|channel|>"], "<|return|>", ["<|call|>"]),
    "Solar": (["<|flush|>", "<|end|>", "<|calls|>", "<|im_end|>"], "<|im_end|>", ["<|flush|>", "<|calls|>"]),
    "Gemma 4": (["</s>", "<eos>", "<turn|>", "<|tool_response>"], "<eos>", ["<turn|>", "<|tool_response>"]),
    "Kimi K2": (["[EOS]", "[EOT]", "[BOS]"], "[EOS]", ["[EOT]"]),
    "Mistral as ChatML": (["<s>", "</s>", "<|im_start|>", "<|im_end|>"], "</s>", ["<|im_end|>"]),
}
"""Special tokens of vocabularies, the one that the file names as its end, and the others that end an answer."""


@pytest.mark.few(6)
@pytest.mark.parametrize("special", [True, False], ids=["control", "normal"])
@pytest.mark.parametrize("family", ENDS)
def test_an_answer_ends_where_llama_cpp_ends_it(
    family: str, special: bool, byte_level: Vocabulary, tmp_path: pathlib.Path
) -> None:
    """Published files name one end, and chats end with another one. Old converters gave such tokens no type."""
    added, named, others = ENDS[family]
    count = byte_level.types.index(CONTROL)
    tokens = [*byte_level.tokens[:count], *added]
    types = [*byte_level.types[:count], *[CONTROL if special else NORMAL] * len(added)]
    end = named if isinstance(named, int) else tokens.index(named)
    vocabulary = Vocabulary(tokens, types, merges=byte_level.merges)
    path = gguf_of(tmp_path, vocabulary, tokenizer__ggml__pre="gpt-2", tokenizer__ggml__eos_token_id=end)
    found = load_model_config(gguf_folder(path)).eos_token_ids
    assert found[0] == end
    assert set(found) == {end, *map(tokens.index, others)}
    reference = LlamaCppTokenizer(path)
    try:
        assert set(found) == reference.ends()
    finally:
        reference.close()
