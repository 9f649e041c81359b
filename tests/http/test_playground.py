"""The page at `/` in a headless Chromium, against a server of the demo model with an API key and drafts.

`MANTA_PICTURES=FOLDER` keeps pictures of the page, and `MANTA_NEEDS_BROWSER=1` (continuous integration) turns a missing
Chromium into a failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from axe_playwright_python.sync_playwright import Axe

from manta.cluster.engine.engine import Engine
from tests.browser import browser, chromium_path
from tests.grammar_pools import DEMO
from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S, wait_until
from tests.schema_cases import CASES
from tests.server import Client

KEY = "a-key-of-the-playground"
HEADERS = {"authorization": f"Bearer {KEY}"}
DESKTOP, PHONE = {"width": 1120, "height": 700}, {"width": 360, "height": 740}
QUESTION, SCHEMA, TOOL, TOKENS = range(4)
"""The examples on the page."""
CONTROLS = {"model", "new_chat", "open_code", "open_key", "toggle_theme", "toggle_settings", "prompt", "send", "system"}
CONTROLS |= {"temperature", "n", "format", "show_tokens", "conversation", "close_settings"}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    settings = ("served_model_name=demo", f"api_keys=[{KEY}]", "engine.speculative={proposers: [forced, ngram]}")
    running = ThreadedServer(*settings, folder=DEMO)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = chromium_path()
    if path is None:
        why = "no Chromium is installed; on Debian: apt-get install chromium"
        assert "MANTA_NEEDS_BROWSER" not in os.environ, why
        pytest.skip(why)
    with browser(path) as started:
        yield started


class Playground:
    """The page in a profile of its own, as a reader uses it."""

    def __init__(self, page: Any, server: Client) -> None:
        self.page = page
        self.server = server
        self.sent: list[dict[str, Any]] = []
        """Bodies of its requests for chats."""
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("request", lambda request: request.method == "POST" and self.sent.append(request.post_data_json))

    def open(self, key: str = KEY) -> None:
        self.page.goto(self.server.url)
        if key:
            self.give_key(key)
            self.page.wait_for_selector("#model option", state="attached")

    def give_key(self, key: str) -> None:
        self.page.fill("#key_dialog[open] #key", key)
        self.page.keyboard.press("Enter")

    def example(self, number: int) -> None:
        """Clicks an example and waits for its answer."""
        self.page.click("#new_chat")
        self.page.click(f"#examples li:nth-child({number + 1}) button")
        self.answered()

    def answered(self, count: int = 1) -> None:
        self.page.wait_for_selector(f":nth-match(.answer, {count}) .meta:not(:empty)")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def asked(self, number: int = -1) -> dict[str, Any]:
        """What the server answers to a request of the page, without the page and not streamed."""
        ignored = ("stream", "stream_options")
        body = {name: value for name, value in self.sent[number].items() if name not in ignored}
        status, _, answer = self.server.post("/v1/chat/completions", body, HEADERS)
        assert status == 200, answer
        return answer

    def picture(self, name: str) -> None:
        folder = os.environ.get("MANTA_PICTURES")
        if folder:
            self.page.screenshot(path=pathlib.Path(folder) / f"{name}.png")


@pytest.fixture
def playground(request: pytest.FixtureRequest, chromium: Any, server: ThreadedServer) -> Iterator[Playground]:
    """Fails if the page raised an error or broke its own Content-Security-Policy."""
    options = getattr(request, "param", {"viewport": DESKTOP, "color_scheme": "light"})
    context = chromium.new_context(**options)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: "Security" in message.text and errors.append(message.text))
    yield Playground(page, server)
    context.close()
    assert errors == []


# ---- what the server sends -----------------------------------------------------------------------------------------


def test_only_browsers_get_the_page(server: ThreadedServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/").json()["name"] == "Manta"
        page = client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self';" in page.headers["content-security-policy"]
        assert not re.search(r"https?://|<style|<script>| on\w+=| style=", page.text), "nothing inline, nothing foreign"
        again = client.get("/", headers={"accept": "text/html", "if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        script = client.get("/playground/app.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert script.headers["etag"] != page.headers["etag"]
        for missing in ("index.html", "none.js", "../app.py", "%2e%2e/app.py", "__init__.py"):
            assert client.get(f"/playground/{missing}").status_code == 404


# ---- what a reader does --------------------------------------------------------------------------------------------


def test_the_key_stays_in_the_tab(playground: Playground) -> None:
    playground.open(key="")
    playground.give_key("a-wrong-key-of-nobody")
    playground.page.wait_for_selector("#model:not(:has(option))", state="attached")
    playground.give_key(KEY)
    playground.page.wait_for_selector("#model option", state="attached")
    stored = playground.page.evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert json.loads(stored) == [{}, {"manta-key": KEY}, ""]
    playground.page.click("#open_key")
    playground.page.click("text=Forget it")
    playground.page.wait_for_selector("#key_dialog[open]")  # the models are asked for again, without a key
    assert playground.page.evaluate("() => sessionStorage.length") == 0


def test_two_requests_ask_for_one_key(playground: Playground) -> None:
    """The list of models is refused while the reader already types the key that a question was refused for."""
    page, held = playground.page, []
    page.route("**/v1/models", lambda route: route.continue_() if held else held.append(route))
    playground.open(key="")
    page.click("#examples li:first-child button")
    page.fill("#key_dialog[open] #key", KEY)
    held[0].continue_()
    page.wait_for_function("() => document.getElementById('key_reason').textContent.startsWith('This server asks')")
    assert page.input_value("#key") == KEY
    page.keyboard.press("Enter")
    playground.answered()
    assert page.evaluate("() => sessionStorage.getItem('manta-key')") == KEY
    assert page.locator("#key_dialog[open]").count() == 0


class Gate:
    """Holds the engine from its third step with tokens on, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        step, count = Engine.step, iter(range(1000))

        def held(engine: Engine) -> Any:
            outputs = step(engine)
            if any(output.token_ids for output in outputs) and next(count) >= 2:
                self._opened.wait(PATIENCE_S)
            return outputs

        monkeypatch.setattr(Engine, "step", held)

    def open(self) -> None:
        self._opened.set()


def test_a_streamed_answer_can_be_stopped(
    playground: Playground, server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    playground.open()
    playground.example(QUESTION)
    (text,) = playground.texts(".choice > .text")
    assert text == playground.asked()["choices"][0]["message"]["content"]
    assert playground.texts("#announcements") == [f"Manta: {text}"]
    assert re.fullmatch(r"[\d,]+|\u2013", playground.texts("#speed")[0])  # a dash if all tokens came within 5 ms
    gate = Gate(monkeypatch)
    playground.page.fill("#prompt", "Who are you?")
    playground.page.keyboard.press("Enter")
    playground.page.wait_for_selector(":nth-match(.answer, 2) .choice > .text:not(:empty)")
    playground.page.keyboard.press("Escape")
    playground.page.wait_for_selector("text=This answer was stopped by you.")
    gate.open()
    aborted = re.compile(r'manta:sequences_total{finished_reason="abort".*} 1\.0')
    wait_until(lambda: aborted.search(server.get("/metrics")) is not None)
    playground.page.fill("#prompt", "What is Manta?")
    playground.page.click("#send")
    playground.answered(3)
    roles = [message["role"] for message in playground.sent[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"], "what was stopped is part of the conversation"


def test_the_page_checks_answers_against_the_schema(playground: Playground) -> None:
    playground.open()
    playground.example(SCHEMA)
    schema = playground.sent[-1]["response_format"]["json_schema"]["schema"]
    jsonschema.validate(json.loads(playground.texts(".choice > .text")[0]), schema)
    assert playground.texts(".answer .note") == ["Satisfies the schema"]
    loose = {"type": "string", "format": "hostname", "unevaluatedItems": {"type": "integer"}, "maxLength": 9}
    playground.page.fill("#schema", json.dumps(loose))
    playground.page.uncheck("#strict")
    playground.page.fill("#prompt", "Say something.")
    playground.page.keyboard.press("Enter")
    playground.answered(2)
    notes = playground.texts(":nth-match(.answer, 2) .note")
    assert notes[0] == "Satisfies the schema"
    assert notes[1] == "This page does not check format, unevaluatedItems"
    unnamed = {"type": "object", "properties": {"a": {"$dynamicRef": "#nowhere"}}, "required": ["a"]}
    playground.page.fill("#schema", json.dumps(unnamed))
    playground.page.fill("#max_tokens", "30")
    playground.page.fill("#prompt", "Say more.")
    playground.page.keyboard.press("Enter")
    playground.answered(3)
    said = "".join(playground.texts(":nth-match(.answer, 3) .note"))
    assert re.search(r"The server does not enforce .*\$dynamicRef", said)
    playground.page.fill("#schema", '{"type": ')
    playground.page.fill("#prompt", "Go on.")
    playground.page.keyboard.press("Enter")
    assert playground.texts("#settings_error")[0].startswith("The schema is not valid JSON")
    assert playground.page.evaluate("() => document.activeElement.id") == "schema"
    assert playground.page.input_value("#prompt") == "Go on."


def test_the_pages_verdict_is_that_of_jsonschema(playground: Playground) -> None:
    playground.open(key="")
    cases = [{"schema": case.schema, "values": [*case.valid, *case.invalid]} for case in CASES]
    verdicts = playground.page.evaluate(
        """async (cases) => {
            const { mistakes, unchecked } = await import("/playground/schema.js");
            return cases.map(({ schema, values }) =>
                unchecked(schema).length ? null : values.map((value) => !mistakes(schema, value).length));
        }""",
        cases,
    )
    compared = [pair for pair in zip(CASES, verdicts, strict=True) if pair[1] is not None]
    assert len(compared) > 0.8 * len(CASES)
    for case, verdict in compared:
        assert verdict == [True] * len(case.valid) + [False] * len(case.invalid), case


def test_a_tool_is_called_and_its_result_told(playground: Playground) -> None:
    playground.open()
    playground.example(TOOL)
    assert json.loads(playground.texts(".call pre")[0]) == {"city": "Kyoto"}
    playground.page.fill(".results textarea", "It is 21 degrees and sunny.")
    playground.page.click("text=Send result")
    playground.answered(2)
    call, result = playground.sent[-1]["messages"][-2:]
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "It is 21 degrees and sunny.",
    }
    assert playground.texts(".choice > .text")[1] == playground.asked()["choices"][0]["message"]["content"]


def test_an_earlier_offer_begins_no_second_answer(playground: Playground) -> None:
    page = playground.page

    def fail() -> None:
        page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
        page.fill("#prompt", "What is Manta?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".failure button")

    playground.open()
    playground.example(TOOL)
    fail()
    assert page.locator(".results").count() == 0, "the conversation has gone on without the tool's result"
    page.click("#new_chat")
    fail()
    page.fill("#prompt", "Who are you?")
    page.keyboard.press("Enter")
    playground.answered()
    assert page.locator(".failure").count() == 1
    assert page.locator(".failure button").count() == 0


def test_choices_stand_side_by_side_with_alternatives(playground: Playground) -> None:
    playground.open()
    playground.page.fill("#seed", "5")
    playground.example(TOKENS)
    left, right = (each.bounding_box() for each in playground.page.locator(".choice").all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    choices = playground.asked()["choices"]
    for number, choice in enumerate(choices):
        entries = choice["logprobs"]["content"]
        shown = playground.page.locator(f":nth-match(.choice, {number + 1}) .token")
        assert shown.all_text_contents() == [entry["token"] for entry in entries]
        classes = [each.get_attribute("class").split()[1] for each in shown.all()]
        kinds = {"model": "drawn", "ngram": "draft", "forced": "forced"}
        forced = [kind == "forced" for kind in classes]
        assert forced[: len(entries)].count(True) >= 4, "the keys of the schema"
        assert set(classes) <= set(kinds.values())
    playground.page.hover(".choice:first-child .token:nth-child(4)")
    top = choices[0]["logprobs"]["content"][3]["top_logprobs"]
    assert playground.texts("#alternatives code") == [each["token"].replace(" ", "␣") for each in top]
    playground.page.focus(".choice:first-child .tokens")
    for key in ("ArrowRight", "End"):
        playground.page.keyboard.press(key)
    active = playground.page.get_attribute(".choice:first-child .tokens", "aria-activedescendant")
    assert playground.page.inner_text(f"#{active}") == choices[0]["logprobs"]["content"][-1]["token"]
    playground.page.click(".choice:nth-child(2) .pick")
    playground.page.fill("#prompt", "Thanks.")
    playground.page.keyboard.press("Enter")
    playground.answered(2)
    assert playground.sent[-1]["messages"][1]["content"] == choices[1]["message"]["content"]


def test_the_request_as_code_gives_the_same_answer(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    playground.open()
    playground.example(SCHEMA)
    (text,) = playground.texts(".choice > .text")
    playground.page.fill("#system", 'Don\'t be "shy" \\ about it.')
    playground.page.fill("#top_k", "40")
    playground.page.fill("#prompt", "Extract the order as JSON: Mona's shop in Perth wants 7 mugs.")
    playground.page.click("#open_code")
    curl, python = playground.page.inner_text("#curl"), playground.page.inner_text("#python")
    playground.page.keyboard.press("Escape")
    playground.page.focus("#prompt")
    playground.page.keyboard.press("Enter")
    playground.answered(2)
    _, text = playground.texts(".choice > .text")
    assert KEY not in curl + python
    monkeypatch.setenv("MANTA_API_KEY", KEY)
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    chunks = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python, {})
    assert printed.getvalue() == f"{text}\n"


# ---- how it is used and looks --------------------------------------------------------------------------------------


def test_the_keyboard_reaches_everything(playground: Playground) -> None:
    playground.open()
    playground.page.focus("#prompt")
    playground.page.keyboard.type("What is")
    playground.page.keyboard.press("Shift+Enter")
    playground.page.keyboard.type("Manta?")
    playground.page.keyboard.press("Enter")
    playground.answered()
    assert playground.sent[-1]["messages"][-1]["content"] == "What is\nManta?"
    reached = set()
    for _ in range(60):
        playground.page.keyboard.press("Tab")
        where = playground.page.evaluate(
            "() => [document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(where[0])
        assert where[0] in ("", "prompt") or where[1] != "none", f"{where[0]} has the focus and does not show it"
    assert reached >= CONTROLS
    playground.page.focus("#open_code")
    playground.page.keyboard.press("Enter")
    playground.page.wait_for_selector("#code_dialog[open]")
    playground.page.keyboard.press("Escape")
    playground.page.wait_for_selector("#code_dialog:not([open])", state="attached")
    assert playground.page.evaluate("() => document.activeElement.id") == "open_code"


@pytest.mark.parametrize(
    "playground",
    [
        pytest.param(
            {"viewport": size, "color_scheme": scheme, "reduced_motion": "reduce"},
            id=f"{name}-{scheme}",
            marks=[] if scheme == in_make_test else pytest.mark.prove,
        )
        for name, size, in_make_test in (("desktop", DESKTOP, "light"), ("phone", PHONE, "dark"))
        for scheme in ("light", "dark")
    ],
    indirect=True,
)
def test_it_is_accessible_and_fits(playground: Playground, request: pytest.FixtureRequest) -> None:
    """In each state axe-core finds no violation, and nothing is wider than the window."""
    name = request.node.callspec.id
    page, sizes, axe = playground.page, [], Axe()
    page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", 0))))

    def look(state: str) -> None:
        page.wait_for_timeout(0)
        violations = axe.run(page).response["violations"]
        assert violations == [], f"{state}: {json.dumps(violations, indent=1)}"
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"], state
        playground.picture(f"{name}-{state}")

    playground.open(key="")
    page.wait_for_selector("#key_dialog[open]")
    look("key")
    playground.give_key(KEY)
    page.wait_for_selector("#model option", state="attached")
    assert 0 < sum(sizes) < 150_000
    look("welcome")
    playground.example(TOOL)
    look("tool")
    playground.example(TOKENS)
    page.hover(".choice:last-child .token:last-child")
    look("tokens")
    if name.startswith("phone"):
        page.click("#toggle_settings")
        look("settings")
        page.click("#close_settings")
    page.click("#open_code")
    look("code")
    page.keyboard.press("Escape")
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#toggle_theme")
    after = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert before != after
    page.reload()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == after
