"""Access to the server: names in Host, web pages of other origins, client addresses and API keys.

The last tests show that text of a request or a checkpoint stays text wherever it is shown.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
import socket
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE

from manta.cluster.cli import chat
from manta.cluster.cli.__main__ import main
from manta.cluster.config import ServeConfig, load_config
from manta.cluster.engine.request import EngineRequest
from manta.cluster.http.access.addresses import network_of
from manta.cluster.http.access.keys import ApiKeys, openness, with_api_keys
from manta.cluster.http.exchange.reply import not_enforced_header
from manta.cluster.serve_limits import KeyLimits
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import TokenizerError
from manta.structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, Kind, check_limits
from tests.async_tests import async_test
from tests.http.test_routes import App
from tests.local_server import local_server

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
PAGE = "https://chat.example"


def asked(app: App, **headers: str) -> int:
    return app.ask(
        "POST", "/v1/chat/completions", CHAT, **{k.replace("_", "-"): v for k, v in headers.items()}
    ).status_code


# ---- names and pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example", "origin": "http://evil.example", "content_type": "text/plain"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example:8000"}, 403),
        ({"host": "localhost:8000", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "null"}, 403),
        ({"host": "localhost:8000", "sec_fetch_site": "cross-site"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, 403),
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_foreign_names_and_pages_are_refused_on_loopback(headers: dict[str, str], status: int) -> None:
    assert asked(App(), **headers) == status


def test_whoever_the_operator_names_may_use_it() -> None:
    assert asked(App(allowed_hosts=("llm.example",)), host="llm.example") == 200
    assert asked(App(allowed_hosts=("*",)), host="evil.example") == 200
    assert asked(App(host="0.0.0.0", allowed_hosts=("*",)), host="evil.example") == 200
    named = App(host="0.0.0.0", allowed_hosts=("llm.example",))
    assert [asked(named, host=host) for host in ("llm.example:80", "evil.example")] == [200, 403]
    assert asked(App(cors_origins=(PAGE,)), origin=PAGE) == 200
    assert asked(App(cors_origins=("*",)), origin=PAGE, sec_fetch_site="cross-site") == 200
    assert asked(App(cors_origins=(PAGE,)), origin="https://other.example") == 403


HOSTNAME = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8000", 403),
        (f"evil.{HOSTNAME}", 403),
        ("192.168.7.5.evil.example", 403),
        ("192.168.7.5:8000", 200),
        ("[fd00::5]:8000", 200),
        ("localhost:8000", 200),
        (HOSTNAME.upper(), 200),
        (f"{HOSTNAME.partition('.')[0]}.local:8000", 200),
    ],
)
def test_without_keys_only_unforgeable_host_names_are_answered(host: str, status: int) -> None:
    """A page whose name points here (DNS rebinding) would count as a page of this server."""
    assert asked(App(host="0.0.0.0"), host=host, origin=f"http://{host}") == status
    app = App(host="0.0.0.0", api_keys=("a-secret-of-the-test",))
    assert asked(app, host=host, authorization="Bearer a-secret-of-the-test") == 200, "a page has no key"


@pytest.mark.parametrize("proxy", ["*", "proxy.example", "10.0.0.7/8"])
def test_a_trusted_proxy_is_an_address(proxy: str) -> None:
    with pytest.raises(ValueError, match="trusted_proxies"):
        load_config(None, {"trusted_proxies": [proxy]})


@pytest.mark.parametrize(
    ("proxies", "forwarded", "expected"),
    [
        ((), "10.1.1.1", {"127.0.0.1"}),
        (("127.0.0.1",), "10.1.1.1", {"10.1.1.1"}),
        (("127.0.0.0/8", "10.0.0.0/8"), "192.0.2.9, 10.1.1.1", {"192.0.2.9"}),
        (("127.0.0.1",), "2001:db8::7", {"2001:db8::/64"}),
        (("127.0.0.1",), "x" * 900, {"x" * 64}),
    ],
)
@async_test
async def test_only_a_trusted_proxy_names_the_client(
    proxies: tuple[str, ...], forwarded: str, expected: set[str]
) -> None:
    """By the client's address its requests take turns: who could choose it would have as many turns as names."""
    async with local_server(trusted_proxies=proxies) as server:
        engine, clients = server.replica.engine, set()
        add_request = engine.add_request

        def noted(request: EngineRequest, *rest: Any, **options: Any) -> None:
            clients.add(request.client)
            add_request(request, *rest, **options)

        engine.add_request = noted  # type: ignore[method-assign]
        status, _ = await server.post((f"X-Forwarded-For: {forwarded}",), max_tokens=1)
        assert (status, clients) == (200, expected)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_addresses_that_a_client_can_choose_are_one(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_page_that_is_named_reads_every_answer() -> None:
    app = App(cors_origins=(PAGE,))
    for method, path, body in (
        ("POST", "/v1/chat/completions", CHAT),
        ("GET", "/nowhere", None),
        ("POST", "/tokenize", {}),
    ):
        answer = app.ask(method, path, body, origin=PAGE)
        assert answer.headers["access-control-allow-origin"] == PAGE, path
        assert answer.headers["vary"] == "origin"
    assert "access-control-allow-origin" not in app.ask("GET", "/v1/models", origin="https://other.example").headers
    assert app.ask("GET", "/v1/models").headers["vary"] == "origin", "a cache must not give this answer to the page"
    assert App(cors_origins=("*",)).ask("GET", "/v1/models", origin=PAGE).headers["access-control-allow-origin"] == "*"


def test_a_page_reads_all_headers_of_an_answer() -> None:
    limits = {"team": KeyLimits(requests_per_minute=60, tokens_per_minute=6000)}
    app = App(cors_origins=(PAGE,), api_keys=("team:a-secret-of-the-test",), key_limits=limits)
    key = {"authorization": "Bearer a-secret-of-the-test"}
    answer = app.ask("POST", "/v1/chat/completions", CHAT, origin=PAGE, **key)
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    own = {name for name in answer.headers if name.startswith("x-")} - {"x-content-type-options"}
    assert "x-ratelimit-remaining-tokens" in own
    assert own <= exposed


def test_a_preflight_is_answered_without_a_key() -> None:
    app = App(cors_origins=(PAGE,), api_keys=("a-secret-of-the-test",))
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}
    answer = app.ask("OPTIONS", "/v1/chat/completions", origin=PAGE, **asks)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "POST, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert app.ask("OPTIONS", "/v1/chat/completions", origin="https://other.example", **asks).status_code == 403
    assert app.ask("OPTIONS", "/nowhere", origin=PAGE, **asks).status_code == 404
    plain = app.ask("OPTIONS", "/v1/models")
    assert (plain.status_code, plain.headers["allow"]) == (204, "GET, POST, HEAD, OPTIONS")


def test_head_is_taken_where_get_is() -> None:
    app = App()
    assert app.ask("HEAD", "/v1/models").status_code == 200
    assert app.ask("HEAD", "/v1/chat/completions").status_code == 405


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((), "holds no key"),
        (("",), "has 0 characters and must have 16"),
        (("short",), "has 5 characters"),
        (("team:",), "has 0 characters"),
        (("sixteen letters and spaces",), "neither NAME:KEY nor KEY"),
        (("a:b:sixteen-characters",), "neither NAME:KEY nor KEY"),
        (("team:sixteen-characters", "team:other-sixteen-characters"), "two keys have the name"),
        (("team:sha256:0123",), "no NAME:sha256:DIGEST with 64 hexadecimal digits"),
        ((f"sha256:{'0' * 64}",), "no NAME:sha256:DIGEST"),
    ],
)
def test_a_key_that_protects_nothing_is_refused(entries: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        with_api_keys(ServeConfig(api_keys=entries))
    assert not any(entry and entry in str(refused.value) for entry in entries)


def test_a_digest_stands_for_its_key(tmp_path: pathlib.Path) -> None:
    """As `printf %s KEY | sha256sum` prints it; whoever reads the file has no key."""
    key, other = "a-secret-of-the-test", "another-secret-of-it"
    digest = hashlib.sha256(key.encode()).hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"team:sha256:{digest.upper()}\nboss:{other}\n")
    config = with_api_keys(ServeConfig(api_keys_file=str(file)))
    assert key not in repr(config)
    assert with_api_keys(config) == config
    keys = ApiKeys(config.api_keys or ())
    assert [keys.name_of(each) for each in (key, other, digest, f"sha256:{digest}")] == ["team", "boss", None, None]
    assert keys.owner_of("team") == ApiKeys([f"team:{key}"]).owner_of("team"), "its files stay its own"
    app = App(api_keys=config.api_keys)
    assert [asked(app, authorization=f"Bearer {each}") for each in (key, digest)] == [200, 401]


def test_keys_come_from_configuration_file_and_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nteam:the-keys-of-the-file\n\nwithout-any-name-it-is\n")
    monkeypatch.setenv("MANTA_API_KEYS", "ci:the-keys-of-the-environment,sixteen-characters")
    config = with_api_keys(ServeConfig(api_keys=("boss:the-keys-of-the-boss",), api_keys_file=str(file)))
    keys = ApiKeys(config.api_keys or ())
    assert list(keys.by_name) == ["boss", "team", "key-3", "ci", "key-5"]
    assert keys.name_of("the-keys-of-the-environment") == "ci"
    assert keys.name_of("the-keys-of-the-file ") is None
    assert keys.name_of("") is None
    assert with_api_keys(config) == config, "a second look finds the same"
    for text in ("", "# none\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="api_keys_file holds no key"):
            with_api_keys(ServeConfig(api_keys_file=str(file)))
    monkeypatch.setenv("MANTA_API_KEYS", "")
    with pytest.raises(ValueError, match="MANTA_API_KEYS holds no key"):
        with_api_keys(ServeConfig())
    with pytest.raises(ValueError, match="cannot read api_keys_file"):
        with_api_keys(ServeConfig(api_keys_file=str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_weights": {"tean": 2}}, r"client_weights: no API key has the name 'tean': .* names team, key-2;"),
        ({"priority_clients": ("*", "key-3")}, "priority_clients: no API key has the name 'key-3'"),
        ({"operator_keys": ("*", "tean")}, "operator_keys: no API key has the name 'tean'"),
        ({"client_weights": {"team": 2}, "api_keys": ()}, "client_weights: .* there are no API keys"),
    ],
)
def test_key_options_without_keys_are_refused(options: dict[str, Any], message: str) -> None:
    keys = ("team:sixteen-characters", "other-sixteen-characters")
    given = {"api_keys": keys, "client_weights": {"team": 3}, "priority_clients": ("*", "key-2"), **options}
    with pytest.raises(ValueError, match=message):
        with_api_keys(ServeConfig(**{**given, "api_keys": given["api_keys"] or None}))


KEYS = ("team:a-secret-of-the-test", "boss:another-secret-of-it")


@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        ({}, [200, 200]),
        ({"host": "0.0.0.0"}, [403, 403]),
        ({"api_keys": KEYS}, [401, 200]),
        ({"api_keys": KEYS, "host": "0.0.0.0"}, [401, 403]),
        ({"api_keys": KEYS, "host": "0.0.0.0", "operator_keys": ("team",)}, [401, 200]),
        ({"api_keys": KEYS, "operator_keys": ("boss",)}, [401, 403]),
        ({"api_keys": KEYS, "host": "0.0.0.0", "operator_keys": ("*",)}, [401, 200]),
    ],
)
def test_only_operators_change_what_is_served(options: dict[str, Any], statuses: list[int]) -> None:
    app = App(**options)
    for headers, status in zip(({}, {"authorization": "Bearer a-secret-of-the-test"}), statuses, strict=True):
        answer = app.ask("POST", "/v1/operators/x", {"text": "a"}, **headers)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "operators_only"


def test_null_from_an_unset_variable_opens_nothing(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api_keys:\n")
    with pytest.raises(ValueError, match="api_keys is empty"):
        load_config(file)


def test_a_key_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--set", "api_keys=[a-secret-of-the-test]"]) == 2
    printed = capsys.readouterr().err
    assert "MANTA_API_KEYS" in printed
    assert "a-secret-of-the-test" not in printed


def test_chat_takes_its_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str | None]] = []
    monkeypatch.setattr(chat, "run_chat", lambda *arguments: asked.append(arguments[:3]) or 0)
    monkeypatch.setenv("MANTA_API_KEY", "a-secret-of-the-test")
    assert main(["chat", "--url", "u"]) == 0
    assert asked == [("u", None, "a-secret-of-the-test")]


def test_an_open_public_server_is_warned_of() -> None:
    assert openness(ServeConfig()) is None
    assert openness(ServeConfig(host="0.0.0.0", api_keys=("a-secret-of-the-test",))) is None
    assert "may use this server" in (openness(ServeConfig(host="0.0.0.0")) or "")


def test_key_names_are_logged_and_keys_are_not() -> None:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    app, handler = App(api_keys=("team:a-secret-of-the-test", "another-secret-of-the-test")), Handler()
    logger = logging.getLogger("manta.requests")
    logger.addHandler(handler)
    try:
        for key in (
            "a-secret-of-the-test",
            "a-secret-of-the-test",
            "another-secret-of-the-test",
            "a-wrong-one-which-is-long",
        ):
            app.ask("POST", "/v1/chat/completions", CHAT, authorization=f"Bearer {key}")
    finally:
        logger.removeHandler(handler)
    assert [json.loads(line).get("client") for line in lines] == ["team", "team", "key-2", None]
    metrics: Any = app.app._state.metrics
    shown = metrics.render([]).decode()
    assert 'manta:client_requests_total{client="team",model_name="demo"} 2.0' in shown
    assert 'client="key-2",model_name="demo"} 1.0' in shown
    assert not any("secret" in text or "wrong" in text for text in (shown, *lines))


# ---- what a request or a checkpoint brings ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\rX-Evil: 1", "a\r\nb", "\x00\x7f", "é\u2028", "x" * 10_000])
def test_property_names_are_escaped_and_cut_in_headers(name: str) -> None:
    value = not_enforced_header([f"{name}: uniqueItems", "other"])
    assert HEADER_VALUE_RE.search(value) is None
    assert len(value) < 4100
    value.decode("ascii")


def test_no_code_of_a_checkpoint_runs(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without being asked: by default transformers asks whoever sits at the terminal."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\n")
    named = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"], "AutoConfig": "evil.Evil"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", **named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", **named}))
    (tmp_path / "vocab.json").write_text("{}")  # something to convert
    with pytest.raises(TokenizerError, match="transformers could not make one"):
        Tokenizer(tmp_path)
    assert "Do you wish to run the custom code" not in capfd.readouterr().out
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", "start: " + " | ".join(f"r{i}" for i in range(1001)) + "".join(f'\nr{i}: "a"' for i in range(1001))),
        ("ebnf", "\n".join(f'r{i} ::= "a"' for i in range(1001))),
    ],
)
def test_a_grammar_of_many_rules_is_refused_early(kind: Kind, text: str) -> None:
    with pytest.raises(ConstraintError, match="use fewer or raise max_rules") as caught:
        check_limits(ConstraintSpec(kind=kind, text=text), ConstraintLimits())
    refusal = caught.value.refusal
    assert (refusal.kind, refusal.bound, refusal.unit) == ("over_limit", 1000, "rules")
    check_limits(ConstraintSpec(kind=kind, text=text), ConstraintLimits(max_rules=1002))
