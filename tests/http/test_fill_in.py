"""Texts around a gap become the prompts that the families' own pages show, over HTTP, without an engine."""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
from typing import Any

import httpx
import pytest
import transformers

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.text.fill_in import FORMATS, FillInFormat
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.http.test_routes import RepeatingEngines

BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
PROMPTS = {
    "<|fim_prefix|>": "<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>",
    "<fim_prefix>": "<fim_prefix>{before}<fim_suffix>{behind}<fim_middle>",
    "<fim-prefix>": "<fim-prefix>{before}<fim-suffix>{behind}<fim-middle>",
    "<｜fim▁begin｜>": "<｜fim▁begin｜>{before}<｜fim▁hole｜>{behind}<｜fim▁end｜>",
    "<|code_prefix|>": "<|code_prefix|>{before}<|code_suffix|>{behind}<|code_middle|>",
    "<[fim-prefix]>": "<[fim-suffix]>{behind}<[fim-prefix]>{before}<[fim-middle]>",
    "▁<PRE>": "▁<PRE>{before}▁<SUF>{behind}▁<MID>",
    "[PREFIX]": "[SUFFIX]{behind}[PREFIX]{before}",
}
"""The prompts of the models' own pages, by the first mark."""


class Asked:
    """The application with the demo model's tokenizer, which has the tokens of a format too, and begins sequences."""

    def __init__(self, folder: pathlib.Path, tokens: tuple[str, ...]) -> None:
        folder.mkdir(exist_ok=True)
        demo = pathlib.Path(resolve_model_folder("demo"))
        shutil.copy(demo / "tokenizer_config.json", folder)
        description = json.loads((demo / "tokenizer.json").read_text())
        options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        known = max([*description["model"]["vocab"].values(), *(each["id"] for each in description["added_tokens"])])
        for number, token in enumerate(filter(None, tokens)):
            description["added_tokens"].append({"id": known + 1 + number, "content": token, **options})
        (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False))
        self.tokenizer = Tokenizer(folder)
        self.engines = RepeatingEngines()
        config = ServeConfig(engine=EngineConfig(model="demo"))
        self.app: Any = HttpApp(config, self.tokenizer, self.engines, Metrics("demo"))

    def post(self, path: str, **body: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://localhost"
            ) as client:
                return await client.post(path, json={"model": "demo", **body})

        return asyncio.run(ask())

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(each, skip_special_tokens=False) for each in self.engines.request.prompts]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.prefix)
def test_a_prompt_is_the_one_of_the_models_page(form: FillInFormat, tmp_path: pathlib.Path) -> None:
    ends = [end for end in form.ends if end != "<|endoftext|>"]  # which the demo model's tokenizer has
    asked = Asked(tmp_path, (form.prefix, form.suffix, form.middle, *ends))
    expected = PROMPTS[form.prefix].format(before=BEFORE, behind=BEHIND)
    answer = asked.post("/v1/completions", prompt=[BEFORE, "x = "], suffix=BEHIND, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert asked.prompts() == [expected, PROMPTS[form.prefix].format(before="x = ", behind=BEHIND)]
    end_ids = {asked.tokenizer.token_to_id(end) for end in form.ends}
    assert set(asked.engines.request.engine.params.stop_token_ids) == end_ids
    assert [choice["text"] for choice in answer.json()["choices"]] == ["abcabc"] * 2
    given = asked.tokenizer.encode(BEFORE, add_special_tokens=False)
    asked.post("/v1/completions", prompt=given, suffix=BEHIND, max_tokens=2)
    assert asked.prompts() == [expected], "token ids may stand for the text in front"
    answer = asked.post("/api/generate", prompt=BEFORE, suffix=BEHIND, stream=False)
    assert (answer.status_code, answer.json()["response"]) == (200, "abcabc")
    assert asked.prompts() == [expected], "without a chat template"


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_gap_may_begin_a_file(path: str, tmp_path: pathlib.Path) -> None:
    """Ollama's empty prompt without a suffix only asks whether the model is loaded."""
    form = FORMATS[0]
    asked = Asked(tmp_path, (form.prefix, form.suffix, form.middle))
    answer = asked.post(path, prompt="", suffix=BEHIND, stream=False)
    assert answer.status_code == 200, answer.text
    assert asked.prompts() == [PROMPTS[form.prefix].format(before="", behind=BEHIND)]


def test_a_model_without_tokens_refuses_a_suffix(tmp_path: pathlib.Path) -> None:
    asked = Asked(tmp_path, ("<|fim_prefix|>", "<|fim_middle|>", "<fim_suffix>"))
    for path in ("/v1/completions", "/api/generate"):
        answer = asked.post(path, prompt=BEFORE, suffix=BEHIND)
        assert answer.status_code == 400
        assert "suffix" in answer.text
    assert asked.post("/v1/completions", prompt=BEFORE, suffix="", max_tokens=2).status_code == 200


@pytest.mark.parametrize("begin", ["", "return x", "  x"])
def test_only_the_text_before_a_gap_gets_a_space(begin: str, tmp_path: pathlib.Path) -> None:
    """llama.cpp once wrote CodeLlama's suffix with the space that SentencePiece puts before a text."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abdefghijlnoprtux(),1\n:+",
        "▁r",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    theirs, bare = (
        transformers.CodeLlamaTokenizer(vocab=vocabulary, merges=[("▁", "r")], add_prefix_space=adds)
        for adds in (True, False)
    )
    theirs.save_pretrained(tmp_path)
    asked = Asked(tmp_path / "demo", ())
    tokenizer = Tokenizer(tmp_path)
    asked.app = HttpApp(ServeConfig(engine=EngineConfig(model="demo")), tokenizer, asked.engines, Metrics("demo"))
    marks = theirs.convert_tokens_to_ids(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    before = theirs.encode(BEFORE, add_special_tokens=False)
    behind, begun = (bare.encode(text, add_special_tokens=False) for text in (BEHIND, begin))
    expected = [1, marks[0], *before, marks[1], *behind, marks[2]]
    answer = asked.post("/v1/completions", prompt=BEFORE, suffix=BEHIND, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert asked.engines.request.prompts == [expected]
    answer = asked.post("/infill", input_prefix=BEFORE, input_suffix=BEHIND, prompt=begin, n_predict=2)
    assert answer.status_code == 200, answer.text
    assert asked.engines.request.prompts == [expected + begun]


EXTRA = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2"}]


@pytest.mark.parametrize("has_marks", [True, False])
def test_other_files_come_before_a_gap(has_marks: bool, tmp_path: pathlib.Path) -> None:
    form = FORMATS[0]
    marks = (form.repository, form.file) if has_marks else ()
    asked = Asked(tmp_path, (form.prefix, form.suffix, form.middle, *marks))
    body = {"input_prefix": BEFORE, "input_suffix": BEHIND, "prompt": "a ", "input_extra": EXTRA, "n_predict": 2}
    answer = asked.post("/infill", **body, cache_prompt=True, t_max_predict_ms=9, samplers=["top_k"])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-manta-ignored"] == "cache_prompt, t_max_predict_ms, samplers"
    (prompt,) = asked.engines.request.prompts
    assert answer.json() == {
        "index": 0,
        "content": "abcabc",
        "tokens": [1, 1],
        "stop": True,
        "model": "demo",
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_predicted": 2,
        "tokens_evaluated": len(prompt),
        "tokens_cached": 0,
        "truncated": False,
    }
    repository, file = marks or ("", "")
    files = f"{file}a.py\nA = 1\n{file}file\nB = 2\n"
    files = f"{repository}project\n{files}{file}file\n" if has_marks else files
    gap = PROMPTS[form.prefix].format(before=BEFORE, behind=BEHIND)
    assert asked.prompts() == [f"{files}{gap}a "]
    streamed = asked.post("/infill", **body, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line]
    assert [event["stop"] for event in events] == [False, True]
    assert "".join(event["content"] for event in events) == "abcabc"
    asked.post("/infill", input_prefix=BEFORE)
    assert asked.engines.request.engine.params.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n_predict": 0}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"input_extra": [{}]}, "input_extra[0].text"),
    ],
)
def test_a_refusal_has_the_bodys_own_names(fields: dict[str, Any], field: str, tmp_path: pathlib.Path) -> None:
    form = FORMATS[0]
    answer = Asked(tmp_path, (form.prefix, form.suffix, form.middle)).post("/infill", input_prefix="x", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    answer = Asked(tmp_path, ()).post("/infill", input_prefix="x")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_suffix")


def test_a_sequence_begins_once(tmp_path: pathlib.Path) -> None:
    """A peer wrote the beginning-of-sequence token twice."""
    form = FORMATS[0]
    asked = Asked(tmp_path, (form.prefix, form.suffix, form.middle))
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.leading_special_ids() == [0]
    config = ServeConfig(engine=EngineConfig(model="demo"))
    asked.app = HttpApp(config, tokenizer, asked.engines, Metrics("demo"))
    for adds in (True, False):
        asked.post("/v1/completions", prompt=BEFORE, suffix=BEHIND, max_tokens=2, add_special_tokens=adds)
        (prompt,) = asked.engines.request.prompts
        assert prompt.count(0) == prompt[:1].count(0) == int(adds)
