"""Text, stop strings and logprob texts, against what transformers' own tokenizers encode, decode and render."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import subprocess
import sys

import jinja2
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from manta.cluster.engine.request import FinishStatus, SequenceOutput
from manta.cluster.http.exchange.logprobs import CompletionLogprobText, chat_logprobs, prompt_logprobs
from manta.cluster.text.chat_template import TemplateError
from manta.cluster.text.detokenizer import SequenceText
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import TokenizerError
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import TokenLogprobs
from tests.checkpoints import CORPUS, make_tokenizer

TEXTS = [*CORPUS, "a🙂b東京c", "  two  spaces \n\t", "<|im_start|>user\nhé<|im_end|>", "Ünïcödé ñ ﷽ 👩‍👩‍👧", "x"]
KINDS = ("bytelevel", "llama", "gemma", "metaspace", "wordpiece")


@functools.cache
def folder_of(kind: str) -> pathlib.Path:
    import atexit
    import shutil
    import tempfile

    folder = pathlib.Path(tempfile.mkdtemp(prefix="manta-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if kind == "bytelevel":
        make_tokenizer(folder)
    else:
        _save_sentencepiece_like(kind, folder)
    return folder


def _save_sentencepiece_like(kind: str, folder: pathlib.Path) -> None:
    """Tokenizers with the decoders of Llama 2, Gemma, Mistral's later files (Metaspace) and BERT."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "wordpiece":
        fast = FastTokenizer(models.WordPiece(unk_token="<unk>"))
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        fast.decoder = decoders.WordPiece()
        fast.train_from_iterator(
            CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
        )
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        fast = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        if kind == "metaspace":
            fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
            fast.decoder = decoders.Metaspace(prepend_scheme="first", split=True)
        else:
            replace = normalizers.Replace(" ", "▁")
            fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if kind == "llama" else replace
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if kind == "llama" else steps)
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        fast.train_from_iterator([text.encode("ascii", "ignore").decode() for text in CORPUS], trainer)
        data = json.loads(fast.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
        fast = FastTokenizer.from_str(json.dumps(data))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(folder_of(kind))


@functools.cache
def reference_of(kind: str) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder_of(kind))


def run(
    kind: str,
    ids: list[int],
    params: SamplingParams | None = None,
    *,
    sizes: list[int] | None = None,
    stop_token_id: int | None = None,
    **options: bool,
) -> tuple[str, str | None, int]:
    """(text, stop string, kept tokens) of `ids` in deltas of the given sizes, one token each without."""
    text = SequenceText(tokenizer_of(kind), params or SamplingParams(), **options)
    pieces, start = "", 0
    sizes = list(sizes or [])
    while start < len(ids) or start == 0:
        end = min(len(ids), start + (sizes.pop() if sizes else 1))
        last = end == len(ids)
        delta = text.append(
            SequenceOutput(
                request_id="r",
                index=0,
                token_ids=ids[start:end],
                finish=FinishStatus.FINISHED_STOPPED if last else None,
                stop_token_id=stop_token_id if last else None,
            )
        )
        pieces += delta.text
        if delta.stop_string is not None or last:
            return pieces, delta.stop_string, delta.num_tokens
        start = end
    raise AssertionError("the last delta returns")


# ---- the tokenizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers(kind: str, text: str) -> None:
    ours, reference = tokenizer_of(kind), reference_of(kind)
    ids = ours.encode(text)
    assert ids == reference.encode(text)
    assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(reference)
    added = reference.added_tokens_decoder.items()
    assert ours.special_ids == {token_id for token_id, token in added if token.special}


CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be <b>brief</b> & 'clear'"}, {"role": "user", "content": "東京 🙂"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
]
TEMPLATES = [
    None,
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[U] {{ m.content | tojson }}\n    "
    "{% else %}\n{% generation %}[A] {{ m['content'].strip() }}{% endgeneration %}{{ eos_token }}\n    {% endif %}\n"
    "{% if loop.index > 1 %}{% continue %}{% endif %}-{% endfor %}",
    "{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{{ m.content }}"
    "{% endfor %}{{ ns.count }}{{ strftime_now('%Y') }}{% if tools %}T{% endif %}{{ flag is defined and flag }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_chat_templates_render_as_transformers(
    template: str | None, messages: list[dict[str, str]], tmp_path: pathlib.Path
) -> None:
    make_tokenizer(tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    ours, reference = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "flag": True}):
        expected = reference.apply_chat_template(messages, tokenize=False, **options)
        assert ours.render_chat_template(messages, **options) == expected
        ids = reference.apply_chat_template(messages, return_dict=False, **options)
        assert ours.apply_chat_template(messages, **options) == ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
    ],
)
def test_a_template_that_refuses_says_why(template: str, message: str, tmp_path: pathlib.Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(TemplateError, match=message):
        Tokenizer(tmp_path).apply_chat_template(CHATS[0])


def test_files_that_cannot_be_used_are_named(tmp_path: pathlib.Path) -> None:
    assert not tokenizer_of("llama").has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer_of("llama").apply_chat_template(CHATS[0])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="Jinja"):
        Tokenizer(tmp_path)


def test_template_of_the_configuration_file(tmp_path: pathlib.Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "one {{ messages[0].content }}"}')
    assert Tokenizer(tmp_path).render_chat_template(CHATS[0]) == "one hello"
    with pytest.raises(jinja2.UndefinedError):
        jinja2.Template("{{ a.b }}").render()  # the premise of the next line: attributes of nothing are errors
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ a.b }}"}')
    with pytest.raises(TemplateError, match="undefined"):
        Tokenizer(tmp_path).render_chat_template(CHATS[0])


def test_special_tokens_that_only_the_configuration_names(tmp_path: pathlib.Path) -> None:
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    text = path.read_text().replace('"bos_token"', '"add_bos_token": true, "sep_token": "<sep>", "bos_token"')
    path.write_text(text)
    ours, reference = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("a<sep>b") == reference.encode("a<sep>b")
    assert ours.token_to_id("<sep>") in ours.special_ids
    assert ours.vocab_size == len(reference)


def test_a_model_without_tokenizer_json_is_converted(tmp_path: pathlib.Path) -> None:
    make_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, reference = Tokenizer(tmp_path), reference_of("bytelevel")
    for text in TEXTS[:-2]:
        if "<|im_start|>" not in text:  # only the configuration of the reference names it
            ids = reference.encode(text)
            assert ours.encode(text) == ids
            assert ours.decode(ids) == text
    assert ours.encode("a<|im_end|>") == reference.encode("a<|im_end|>")


def test_token_bytes_make_the_text() -> None:
    ours = tokenizer_of("bytelevel")
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert b"".join(ours.token_bytes(token_id) for token_id in ids) == text.encode()
    assert ours.token_bytes(ours.vocab_size + 5) == b""
    llama = tokenizer_of("llama")
    ids = llama.encode("the 東", add_special_tokens=False)
    assert b"".join(llama.token_bytes(token_id) for token_id in ids) == " the 東".encode()


def test_an_http_process_needs_no_torch() -> None:
    code = (
        "import sys; from manta.cluster.text.detokenizer import SequenceText;"
        "from manta.cluster.http.app import HttpApp; from manta.cluster.text.tokenizer import Tokenizer;"
        f"Tokenizer({str(folder_of('bytelevel'))!r}).encode('hello');"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).parents[2])


def test_bad_words_become_token_sequences() -> None:
    ours, reference = tokenizer_of("bytelevel"), reference_of("bytelevel")
    params = SamplingParams(bad_words=("river", " the"), bad_words_token_ids=((5,),))
    resolved = ours.resolve_bad_words(params)
    expected = {(5,)} | {tuple(reference.encode(word)) for word in ("river", " river", "the", " the")}
    assert set(resolved.bad_words_token_ids) == expected
    plain = SamplingParams()
    assert ours.resolve_bad_words(plain) is plain


# ---- text out of tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_is_the_whole_text(kind: str, skip: bool) -> None:
    reference = reference_of(kind)
    params = SamplingParams(skip_special_tokens=skip)
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        expected = reference.decode(ids, skip_special_tokens=skip)
        for options in ({}, {"final_only": True}):
            assert run(kind, ids, params, continues_prompt=False, **options)[0] == expected, text


@given(st.lists(st.integers(0, 330), max_size=30), st.lists(st.integers(1, 5), max_size=30), st.booleans())
def test_any_deltas_give_the_library_s_text(ids: list[int], sizes: list[int], skip: bool) -> None:
    """Invalid UTF-8 and ids without a token included."""
    params = SamplingParams(skip_special_tokens=skip)
    expected = reference_of("bytelevel").decode(ids, skip_special_tokens=skip) if ids else ""
    assert run("bytelevel", ids, params, sizes=sizes)[0] == expected
    assert run("bytelevel", ids, params, sizes=sizes, final_only=True)[0] == expected


@pytest.mark.parametrize("kind", ["llama", "metaspace", "gemma"])
def test_output_that_continues_a_prompt_keeps_its_space(kind: str) -> None:
    reference = reference_of(kind)
    ids = reference.encode("a fish that lives", add_special_tokens=False)
    prompt = reference.encode("The manta", add_special_tokens=False)
    if kind == "gemma":
        ids = reference.encode(" a fish that lives", add_special_tokens=False)
    assert reference.decode(prompt + ids) == "The manta a fish that lives"
    assert run(kind, ids)[0] == " a fish that lives"


def test_no_piece_ends_inside_a_character() -> None:
    text = SequenceText(tokenizer_of("bytelevel"), SamplingParams())
    ids = reference_of("bytelevel").encode("é🙂")
    assert len(ids) > 2
    pieces = [text.append(SequenceOutput("r", 0, [token_id])).text for token_id in ids]
    assert [piece for piece in pieces if piece] == ["é", "🙂"]
    cut = text.append(SequenceOutput("r", 0, ids[:1], finish=FinishStatus.FINISHED_LENGTH))
    assert cut.text == "\ufffd"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("final_only", [False, True])
def test_the_ending_stop_token_is_not_text(stop: tuple[str, ...], final_only: bool) -> None:
    ids = reference_of("bytelevel").encode("hello")
    params = SamplingParams(skip_special_tokens=False, stop=stop)
    assert run("bytelevel", [*ids, 2], params, stop_token_id=2, final_only=final_only) == ("hello", None, len(ids) + 1)
    assert run("bytelevel", [*ids, 2], params, final_only=final_only)[0] == "hello<|im_end|>"


# ---- stop strings --------------------------------------------------------------------------------------------------


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Reads character by character, as a reader would: (start, stop string) of the first that is complete."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def fewest_tokens(kind: str, ids: list[int], text: str) -> int:
    reference = reference_of(kind)
    return next(n for n in range(len(ids) + 1) if reference.decode(ids[:n]).rstrip("\ufffd").startswith(text))


@given(
    st.text("ab é🙂", max_size=24),
    st.lists(st.text("ab é🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=24),
    st.booleans(),
    st.booleans(),
)
def test_stop_strings_wherever_tokens_and_deltas_end(
    text: str, stops: list[str], sizes: list[int], include: bool, final_only: bool
) -> None:
    ids = reference_of("bytelevel").encode(text)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    got, stop, num_kept = run("bytelevel", ids, params, sizes=sizes, final_only=final_only)
    expected = first_stop(text, params.stop)
    if expected is None:
        assert (got, stop, num_kept) == (text, None, len(ids))
        return
    kept = text[: expected[0] + len(expected[1])] if include else text[: expected[0]]
    assert (got, stop) == (kept, expected[1])
    assert num_kept == fewest_tokens("bytelevel", ids, kept)


def test_text_outside_stop_strings_is_sent_at_once() -> None:
    ids = reference_of("bytelevel").encode("say STop or STOP now")
    text = SequenceText(tokenizer_of("bytelevel"), SamplingParams(stop=("STOP",)))
    out = ""
    for count, token_id in enumerate(ids, 1):
        delta = text.append(SequenceOutput("r", 0, [token_id]))
        out += delta.text
        so_far = reference_of("bytelevel").decode(ids[:count])
        if delta.stop_string:
            break
        held = next((n for n in (3, 2, 1) if so_far.endswith("STOP"[:n])), 0)
        assert out == so_far[: len(so_far) - held]
    assert (out, delta.stop_string) == ("say STop or ", "STOP")


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = reference_of("bytelevel").encode("x, x, x, x")
    for sizes in ([], [3, 3, 3], [9]):
        for min_tokens in range(len(ids) + 1):
            params = SamplingParams(stop=(",",), min_tokens=min_tokens)
            got, stop, _ = run("bytelevel", ids, params, sizes=list(sizes))
            exempt = len(reference_of("bytelevel").decode(ids[:min_tokens]))
            end = "x, x, x, x".find(",", exempt)
            assert (got, stop) == (("x, x, x, x"[:end], ",") if end >= 0 else ("x, x, x, x", None))


def test_stop_strings_in_every_kind_of_tokenizer() -> None:
    for kind in KINDS:
        ids = reference_of(kind).encode("the river end of the day", add_special_tokens=False)
        got, stop, num_kept = run(kind, ids, SamplingParams(stop=("end",)), continues_prompt=False)
        assert (got, stop) == ("the river ", "end"), kind
        reference = reference_of(kind)
        assert reference.decode(ids[:num_kept]).startswith("the river")
        assert not reference.decode(ids[: num_kept - 1]).startswith("the river ")


# ---- log-probabilities ---------------------------------------------------------------------------------------------


def entries_for(ids: list[int]) -> list[TokenLogprobs]:
    source = random.Random(0)
    others = [source.randrange(300) for _ in ids]
    return [
        TokenLogprobs(token_id, -1.5, 2, [other, token_id], [-0.5, -1.5])
        for token_id, other in zip(ids, others, strict=True)
    ]


def test_chat_logprobs_carry_the_bytes_of_split_characters() -> None:
    ids = reference_of("bytelevel").encode("hé 🙂")
    result = chat_logprobs(tokenizer_of("bytelevel"), entries_for(ids))
    assert bytes(byte for item in result.content for byte in item.bytes).decode() == "hé 🙂"
    assert [item.logprob for item in result.content] == [-1.5] * len(ids)
    assert all(item.top_logprobs[1].token == item.token for item in result.content)


def test_completion_logprobs_point_into_the_text() -> None:
    text = "the river 🙂 ends"
    ids = reference_of("bytelevel").encode(text)
    logprobs = CompletionLogprobText(tokenizer_of("bytelevel"))
    result = logprobs.first(ids[0])
    result.extend(logprobs.append(entries_for(ids[1:4])))
    result.extend(logprobs.append(entries_for(ids[4:])))
    assert result.token_logprobs == [None] + [-1.5] * (len(ids) - 1)
    for token, offset in zip(result.tokens, result.text_offset, strict=True):
        assert token.startswith("bytes:\\x") or text[offset:].startswith(token)
    assert "bytes:\\x" in "".join(result.tokens)
    assert result.top_logprobs[0] is None
    assert all(len(top) == 2 for top in result.top_logprobs[1:] if top is not None)


def test_prompt_logprobs_begin_with_none() -> None:
    entry = TokenLogprobs(40, float("-inf"), 320, [41], [-0.1])
    first, second = prompt_logprobs(tokenizer_of("bytelevel"), [entry])
    assert first is None
    assert second is not None
    assert {key: (item.rank, item.logprob) for key, item in second.items()} == {"40": (320, -9999.0), "41": (1, -0.1)}
