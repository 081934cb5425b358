"""Chat templates that would take all time or all memory are stopped; those that real chats need are not."""

import resource
import time
from typing import Any

import pytest

from nibblelm.errors import TokenizerError
from nibblelm.tokenizer.chat_template import render

CHAT = [{"role": "user", "content": "Hello"}]
GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(%d) %%}{%% set ns.x = %s %%}{%% endfor %%}"
HOSTILE = {
    "times": "{{ 'a' * 20000000000 }}",
    "times a list": "{{ [1] * 20000000000 }}",
    "times a long item": "{{ [['a' * 10000] * 1000] * 100000 }}",
    "doubling by ~": GROW % ("'ab'", 60, "ns.x ~ ns.x"),
    "doubling by +": GROW % ("'ab'", 60, "ns.x + ns.x"),
    "doubling a list": GROW % ("[1]", 60, "ns.x + ns.x") + "{{ ns.x }}",
    "a list of itself": GROW % ("'ab'", 60, "[ns.x, ns.x]") + "{{ ns.x }}",
    "a dict of itself": GROW % ("'ab'", 60, "dict(a=ns.x, b=ns.x)") + "{{ ns.x | tojson }}",
    "a tuple in a dict": GROW % ("'ab'", 60, "{'a': (ns.x, ns.x)}") + "{{ ns.x == ns.x | string }}",
    "arguments": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}"
    "{% endmacro %}{{ f(60, 'a') }}",
    "namespaces": GROW % ("'ab'", 60, "namespace(a=ns.x, b=ns.x)") + "{{ [ns.x] * 3000000 }}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "nested ranges with text": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 1000
    + "{% endfor %}{% endfor %}",
    "a block of text": "{% set a %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}{{ a }}",
    "many long pieces": "{% set a = 'x' * 1000000 %}{% for i in range(99999) %}{{ a ~ i }}{% endfor %}",
    "many slices": GROW % ("[]", 99999, "ns.x + [('x' * 1000000)[i:]]"),
    "recursive macros": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% set a = range(40) | list %}{% for x in a recursive %}{{ loop(a) if loop.depth < 30 }}"
    "{% endfor %}",
    "endless recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "replace": GROW % ("'a' * 1000", 3, "ns.x.replace('a', 'a' * 10000)"),
    "replace filter": "{{ ('a' * 10000000) | replace('a', 'a' * 10000) }}",
    "join": "{{ ('a' * 1000000).join(range(99999) | map('string') | list) }}",
    "join filter": "{{ range(99999) | map('string') | join('a' * 1000000) }}",
    "center": "{{ 'a' | center(20000000000) }}",
    "ljust": "{{ 'a'.ljust(20000000000) }}",
    "zfill": "{{ 'a'.zfill(20000000000) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(100000) }}",
    "indent": "{{ ('\n' * 1000000) | indent(100000) }}",
    "indent by text": "{{ ('\n' * 1000000) | indent('a' * 100000) }}",
    "tojson": "{{ [[[[1]]]] | tojson(indent=20000000000) }}",
    "separators": "{{ range(99999) | list | tojson(separators=('a' * 1000000, ':')) }}",
    "format": "{{ '{:>20000000000}'.format(1) }}",
    "format width": "{{ '{:>{}}'.format(1, 20000000000) }}",
    "format again": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "format filter": "{{ '%20000000000d' | format(1) }}",
    "percent": "{{ '%20000000000d' % 1 }}",
    "format in a list": "{{ '{0:>{1[0]}}'.format(1, [20000000000]) }}",
    "percent star": "{{ '%*d' % (20000000000, 1) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "wordwrap": "{{ ('a' * 1000000) | wordwrap(1, wrapstring='b' * 1000000) }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": GROW % ("3", 99, "ns.x * ns.x"),
    "round": "{{ 2 | round(1000000000, 'ceil') }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "strftime": "{{ strftime_now('%999999999Y') }}",
    "long source": "x" * (2 << 20),
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_stopped(template: str) -> None:
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(TokenizerError) as caught:
        render(template, CHAT, {})
    assert len(str(caught.value)) <= 2000
    assert "MemoryError" not in str(caught.value)
    assert time.thread_time() - begun < 15
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 600, "MiB"


def test_what_is_stopped_says_so() -> None:
    with pytest.raises(TokenizerError, match=r"the chat template was stopped: .*16777216 characters.*plain prompt"):
        render(HOSTILE["times"], CHAT, {})
    with pytest.raises(TokenizerError, match=r"the chat template was stopped: it takes more than 500000 steps"):
        render(HOSTILE["nested ranges"], CHAT, {})


TOOLS = """{%- set ns = namespace(last=-1, text='', parts=[]) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- [messages, messages] | tojson(separators=(',', ':')) | length }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- for m in messages %}
{{- '<|' + m['role'] + '|>' ~ m.content | trim | replace('\\n', ' ') }}
{%- if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}
{%- set ns.text = ns.text + m.content[:20] %}
{%- set same = messages | selectattr('role', 'equalto', m.role) | list %}
{%- set ns.parts = ns.parts + [{'role': m.role, 'n': same | length}] %}
{%- endfor %}{{ ns.parts | map(attribute='n') | join(',') }}"""


def test_a_long_chat_is_not_stopped() -> None:
    """Five hundred turns, 1 MB of text, tools; what a template does to every turn takes a few seconds at most."""
    chat: list[Any] = [
        {"role": ("user", "assistant")[i % 2], "content": f"<think>{i}</think>\n" * 140} for i in range(500)
    ]
    tools = [{"name": f"f{i}", "parameters": {"x": {"type": "string"}, "y": list(range(50))}} for i in range(50)]
    begun = time.thread_time()
    text = render(TOOLS, chat, {"tools": tools})
    assert len(text) > 1_000_000
    assert text.endswith(",250,250")
    assert time.thread_time() - begun < 5


def test_budgets_are_of_one_rendering() -> None:
    template = "{% for i in range(40000) %}{% for j in range(10) %}{% endfor %}{% endfor %}x"
    for _ in range(3):
        assert render(template, CHAT, {}) == "x"
