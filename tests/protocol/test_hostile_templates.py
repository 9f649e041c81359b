"""Chat templates of strangers: what takes memory, time or text without bound is refused, and the next is rendered."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import jinja2
import pytest

from manta.cluster.cli.check import check_quickly
from manta.cluster.config import EngineConfig
from manta.cluster.text.chat_template import ChatTemplates, TemplateError, template_process
from manta.workers.models.model_config import ModelError
from tests.checkpoints import checkpoint

VALUES = {"messages": [{"role": "user", "content": "Hello"}], "tools": None, "add_generation_prompt": True}
DOUBLED = "{%% set ns = namespace(s='ab') %%}{%% for i in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ ns.s }}"
MEMORY, TIME, TEXT = "MiB of memory", "s of processor time", "a text of more than"
QUICK = {
    "{{ 'a' * 3000000000 }}": MEMORY,
    "{{ messages | tojson(indent=2000000000) }}": MEMORY,
    "{{ '%3000000000d' % 1 }}": MEMORY,
    "{{ '{:3000000000}'.format(1) }}": MEMORY,
    "{{ 'a'.ljust(3000000000) }}": MEMORY,
    "{{ 'a' | center(3000000000) }}": MEMORY,
    "{{ 'a' | indent(3000000000) }}": MEMORY,
    DOUBLED % "ns.s ~ ns.s": MEMORY,
    DOUBLED % "ns.s.replace('b', ns.s)": MEMORY,
    DOUBLED % "[ns.s, ns.s] | join": MEMORY,
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}": TEXT,
}
SLOW = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}": TIME,
    DOUBLED % "[ns.s, ns.s]": TIME,
    "{{ lipsum(100000) }}": TIME,
    "{{ 999999999.0 | round(999999999, 'ceil') }}": "",
    "{{ range(99999) | map('string') | batch(1, 'x') | list | slice(99999) | list }}": "",
}


@pytest.fixture(autouse=True, scope="module")
def ended_process() -> Iterator[None]:
    yield
    template_process().close()


def rendered(source: str) -> str:
    return ChatTemplates({"default": source}).render(None, VALUES)


@pytest.mark.few(8)
@pytest.mark.parametrize("source", [*QUICK, *SLOW])
def test_a_template_without_bound_is_refused(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        rendered(source)
    assert (QUICK | SLOW)[source] in str(caught.value)
    assert len(str(caught.value)) < 300
    assert rendered("{{ messages[0].content }}") == "Hello"


def test_a_text_may_be_long_for_a_long_conversation() -> None:
    values = VALUES | {"messages": [{"role": "user", "content": "x" * 2**20}] * 4}
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert len(ChatTemplates({"default": source}).render(None, values)) == 2**22


def test_a_deeply_nested_template_is_no_valid_jinja() -> None:
    with pytest.raises(jinja2.TemplateError, match="nested too deeply"):
        ChatTemplates({"default": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"})


def test_values_arrive_as_they_are() -> None:
    values = VALUES | {"number": 10**30, "half": "\ud800", "nothing": None, "pair": (1, 2)}
    source = "{{ number }} {{ half }} {{ nothing }} {{ pair }}"
    assert ChatTemplates({"default": source}).render(None, values) == f"{10**30} \ud800 None (1, 2)"


def test_a_checkpoint_with_such_a_template_is_not_served(tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(next(iter(QUICK)))
    with pytest.raises(ModelError, match=r"chat template .* 512 MiB of memory.*; mend it"):
        check_quickly(EngineConfig(model=str(folder)))
