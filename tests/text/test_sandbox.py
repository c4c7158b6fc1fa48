"""Chat templates as a hostile model file would have them: each must end soon, small, and as an error of the request."""

from __future__ import annotations

import resource
import time

import pytest

from tokenmill.core.errors import InvalidRequest
from tokenmill.text.budget import Limits
from tokenmill.text.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]

TANGLE = (
    "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
)
"""Two values of sixty tuples each that have 2**60 entries when walked."""

BIG = "{% set x = 'x' * 2000000 %}{% set y = 'y' * 1000000 %}"
HUGE_NUMBER = "{% set n = ('f' * 2000000)|int(0, 16) %}"

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "loops that skip all": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "wide loop": "{% for i in range(99999) %}" + "{{ i }}" * 9999 + "{% endfor %}",
    "long searches": BIG + "{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "macro calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "callers double": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 30 + "x" + "{% endcall %}" * 30,
    "map over map": "{% set l = range(60000)|list %}{{ l" + "|map('string')" * 90 + "|list|length }}",
    "power": "{{ 10 ** 10000000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "division": HUGE_NUMBER + "{{ n // 7 }}",
    "divisible": HUGE_NUMBER + "{{ 5 is divisibleby(n) }}",
    "round": "{{ 1|round(1000000000, 'ceil') }}",
    "strip": BIG + "{{ x.strip(y ~ 'x') }}",
    "trim": BIG + "{{ x|trim(y ~ 'x') }}",
    "search from the end": BIG + "{{ x.rfind('y' ~ x[:1000000]) }}",
    "tangle printed": TANGLE + "{{ ns.x }}",
    "tangle joined": TANGLE + "{{ ns.x ~ '' }}",
    "tangle as json": TANGLE + "{{ ns.x|tojson }}",
    "tangle in lower case": TANGLE + "{{ ns.x|lower }}",
    "tangle trimmed": TANGLE + "{{ ns.x|trim }}",
    "tangle formatted": TANGLE + "{{ '%s' % (ns.x,) }}",
    "tangle filtered by format": TANGLE + "{{ '%s'|format(ns.x) }}",
    "tangle in a join": TANGLE + "{{ [ns.x]|join }}",
    "tangle mapped": TANGLE + "{{ [ns.x]|map('string')|list }}",
    "tangle refused": TANGLE + "{{ raise_exception(ns.x) }}",
    "tangles equal": TANGLE + "{{ ns.x == ns.y }}",
    "tangles in order": TANGLE + "{{ ns.x < ns.y }}",
    "tangle contained": TANGLE + "{{ ns.x in [ns.y] }}",
    "tangles tested": TANGLE + "{{ ns.x is eq(ns.y) }}",
    "tangle tested by select": TANGLE + "{{ [ns.x]|select('equalto', ns.y)|list }}",
    "tangle looked for": TANGLE + "{{ [ns.x].index(ns.y) }}",
    "tangle counted": TANGLE + "{{ [ns.x].count(ns.y) }}",
    "tangles change": TANGLE + "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}",
    "tangles sorted": TANGLE + "{{ [ns.x, ns.y]|sort }}",
    "tangles unique": TANGLE + "{{ [ns.x, ns.y]|unique|list }}",
    "largest tangle": TANGLE + "{{ [ns.x, ns.y]|max }}",
    "tangles sorted by value": TANGLE + "{{ {'a': ns.x, 'b': ns.y}|dictsort(by='value') }}",
    "tangle as a key": TANGLE + "{{ {ns.x: 1}|length }}",
    "tangle as a key of dict()": TANGLE + "{{ dict([(ns.x, 1)])|length }}",
    "tangle looked up": TANGLE + "{{ {}[ns.x] }}",
    "tangle got": TANGLE + "{{ {}.get(ns.x) }}",
    "tangle in views": TANGLE + "{{ {'a': ns.x}.items() == {'a': ns.y}.items() }}",
    "tangle of namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set n = namespace(a=ns.x, b=ns.x) %}{% set ns.x = n %}"
    "{% endfor %}{{ ns.x }}",
}

EXPLODING = {
    "product": "{{ 'x' * 10 ** 9 }}",
    "product of a variable": "{% set n = 10 ** 9 %}{{ n * [1] }}",
    "doubling by +": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by set": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 40 + "'ab'" + ")" * 40 + " }}",
    "filter block": "{% filter upper %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endfilter %}",
    "collecting": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['x' * 100000 ~ i] %}{% endfor %}",
    "collecting slices": BIG + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, x[i:]] %}{% endfor %}",
    "collecting ranges": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, range(9999)|list] %}{% endfor %}",
    "join method": BIG + "{{ x.join(y) }}",
    "join filter": BIG + "{{ ([1] * 9999)|join(x) }}",
    "replace method": BIG + "{{ x.replace('x', y) }}",
    "replace nothing": BIG + "{{ x.replace('', y) }}",
    "replace filter": BIG + "{{ x|replace('x', y) }}",
    "indent": BIG + "{{ ('\n' * 1000000)|indent(x) }}",
    "indent of JSON": "{{ [[1]]|tojson(indent=1000000000) }}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "format width as argument": "{{ '%*d' % (1000000000, 1) }}",
    "format precision": "{{ '%.1000000000f'|format(1) }}",
    "many formats": BIG + "{{ ('%(a)s' * 9999) % {'a': x} }}",
    "split": "{{ ('x ' * 2000000).split()|length }}",
    "letters": "{{ ('x' * 4000000)|list|length }}",
    "upper case": "{{ ('ß' * 4000000)|upper|upper }}",
    "too much output": BIG + "{% for i in range(99) %}{{ x }}{% endfor %}",
}

FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "macro function": "{% macro m() %}{% endmacro %}{{ m._func.x }}",
    "loop inside": "{% for i in [1] %}{{ loop._iterable.x }}{% endfor %}",
    "context": "{{ self._TemplateReference__context.x }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "format_map": "{{ '{a}'.format_map({}) }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({}) }}",
    "from_bytes": "{{ (1).from_bytes('x') }}",
    "fromkeys": "{{ {}.fromkeys([1]) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "large range": "{{ range(1000000000) }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as y %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block a %}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "a generator printed": "{{ [1]|map('string') }}",
    "a function printed": "{{ range }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "deep loops": "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "long sum": "{{ " + "1 + " * 5000 + "1 }}",
    "long path": "{{ messages" + ".a" * 5000 + " }}",
    "long not": "{{ " + "not " * 5000 + "1 }}",
}


@pytest.mark.parametrize("source", [*ENDLESS.values(), *EXPLODING.values()], ids=[*ENDLESS, *EXPLODING])
def test_a_template_without_measure_is_stopped(source: str) -> None:
    limits = Limits(seconds=0.2, steps=20_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"the model's chat template (was stopped|fails on these messages)"):
        ChatTemplate(source, limits=limits).render(USER)
    assert time.thread_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "kilobytes"


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_a_template_has_no_use_for_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the model's chat template (cannot be used|fails on these messages)"):
        ChatTemplate(source).render(USER)


def test_time_is_limited_whatever_the_steps() -> None:
    template = ChatTemplate(ENDLESS["loops in loops"], limits=Limits(seconds=0.1, steps=10**12))
    start = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"was stopped: it takes longer than 0\.1 s"):
        template.render(USER)
    assert time.thread_time() - start < 0.5


def test_a_long_conversation_has_a_larger_allowance() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(all='') %}"
        "{% for m in messages %}{% set ns.all = ns.all + m.content|trim %}{{ m.content }}{% endfor %}{{ ns.all }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y" * 1000}] * 100
    assert len(template.render(messages)) == 400_000
    assert len(template.render([{"role": "user", "content": "z" * 10_000_000}])) == 20_000_000


USEFUL = {
    "{{ 'a-b'.split('-')[1] }}": "b",
    "{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}": "a2b1",
    "{% for k, v in {'b': 1}.items() %}{{ k }}{{ v }}{% endfor %}": "b1",
    "{{ messages|map(attribute='role')|join(', ') }}": "user",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}": "1",
    "{{ (messages|rejectattr('role', 'eq', 'user')|list) == [] }}": "True",
    "{{ messages[0].content is string and messages is iterable and messages[0] is mapping }}": "True",
    "{{ 'x' in messages[0].content or 'H' in messages[0]['content'] }}": "True",
    "{{ messages[-1:][0].content|upper|replace('H', 'J')|trim }}": "JI",
    "{{ {'a': [1, 2.5, none, true, 'é<']}|tojson }}": '{"a": [1, 2.5, null, true, "é<"]}',
    "{{ {'b': 1, 'a': [2]}|tojson(indent=2, sort_keys=true) }}": '{\n  "a": [\n    2\n  ],\n  "b": 1\n}',
    "{{ [3, 1, 2]|sort|first }}{{ [3, 1]|max }}{{ [1, 2]|sum }}{{ 'ab'|reverse }}": "133ba",
    "{{ '%s-%02d' % ('a', 5) }}{{ '%s'|format('b') }}": "a-05b",
    "{{ 'a\nb'|indent(2) }}": "a\n  b",
    "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}{{ 7 / 2 }}{{ -1 }}{{ 1.5 + 1 }}": "3183.5-12.5",
    "{{ 'a' ~ 1 ~ [2] }}": "a1[2]",
    "{{ ('a' if false) is undefined }}{{ missing is defined }}{{ missing|default('d') }}": "TrueFalsed",
    "{% macro f(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}{{ f(1, y=3) }}": "1213",
    "{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}": "4",
    "{% for i in [1, 2] %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{% endfor %}": "1False2a2True2b",
    "{% for i in 'ab' recursive %}{{ i }}{% endfor %}{% with x = 1 %}{{ x }}{% endwith %}": "ab1",
    "{{ '<a>'|e }}{{ '<b>'|safe }}{{ 3.14159|round(2) }}{{ 'abc'.startswith('a') }}": "&lt;a&gt;<b>3.14True",
    "{{ dict(a=1).get('b', 'c') }}{{ [1, 2].index(2) }}{{ 'aXb'.lower().partition('x')[2] }}": "c1b",
}


@pytest.mark.parametrize(("source", "expected"), USEFUL.items(), ids=range(len(USEFUL)))
def test_what_templates_use_works(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(USER) == expected
