"""Small templates, written for these tests, and what Jinja2 makes of them in transformers' environment.

Each exercises a construct that chat templates use, or a corner of it. Where Jinja2 raises, lowbit has to refuse. Packages:
transformers. They go to crates/lowbit-jinja/tests, since that crate is published with them.
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

VALUES = {
    "text": "It's \"é\" <b>\n\ttab\\ \u200b\u00ad漢字",
    "number": {"int": 7, "negative": -7, "float": 2.5, "whole": 2.0, "big": 12345678901234567890, "tiny": 1e-7, "huge": 1e22},
    "list": [3, 1, 2],
    "words": ["b", "A", "c", "a"],
    "people": [
        {"name": "Ann", "age": 30, "pet": {"kind": "cat"}},
        {"name": "bob", "age": 25, "pet": {"kind": "dog"}},
        {"name": "Cid", "age": 30},
    ],
    "nested": {"a": [1, 2.0, None, True, "it's", 'say "x"', "both ' \""], "b": {}, "c": [], "items": 1},
    "none": None,
    "empty": "",
}

SOURCES = r"""
{{ text }}|{{ [text] }}
{{ number }}
{{ [1.0, 1e16, 1e15, 123456789.125, 0.0001, 0.00001, -0.0, 1e300 * 1e10] }}
{{ nested }}
{{ nested.items is callable }}{{ nested['items'] }}
{{ nested.b }}{{ nested.c }}{{ nested.nothing }}{{ nested.nothing is defined }}
{{ nested.nothing.more }}
{{ missing }}|{{ missing is defined }}|{{ missing is none }}|{{ [missing] }}
{{ missing.x }}
{{ missing + 1 }}
{{ missing ~ 'x' }}{{ missing | length }}{{ missing | list }}{{ missing == missing }}{{ 'a' in missing }}
{% for x in missing %}x{% else %}none{% endfor %}
{% for x in none %}x{% endfor %}
{{ none | selectattr('x') | list }}{{ none | map('upper') | list }}
{{ none | list }}
{{ 1 is iterable }}{{ none is iterable }}{{ '' is iterable }}{{ missing is iterable }}{{ nested is iterable }}
{{ none is sequence }}{{ 'a' is sequence }}{{ nested is sequence }}{{ missing is sequence }}{{ 1 is sequence }}
{{ none is mapping }}{{ nested is mapping }}{{ list is mapping }}{{ true is number }}{{ 1 is integer }}{{ true is integer }}{{ 1.0 is float }}
{{ none is none }}{{ none is string }}{{ 'a' is string }}{{ true is boolean }}{{ 1 is true }}{{ range is callable }}{{ 1 is callable }}
{{ 3 is odd }}{{ 3 is even }}{{ 9 is divisibleby 3 }}{{ 2 is in [1, 2] }}{{ 1 is eq 1.0 }}{{ 1 is sameas true }}{{ 'a' is lower }}{{ 'A' is upper }}
{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ -7.5 // 2 }} {{ -7.5 % 2 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }}
{{ 1 / 0 }}
{{ 1 % 0 }}
{{ 1 + 2 * 3 - 4 / 2 }} {{ (1 + 2) * 3 }} {{ 1 ~ 2 * 3 }} {{ -1 | abs }} {{ 1 + 1.5 }} {{ true + 1 }}
{{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ 3 * [1, 'x'] }} {{ [1] + [2] }} {{ (1,) + (2, 3) }} {{ 'a' 'b' }}
{{ 'a' + 1 }}
{{ [1] + (2,) }}
{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 == 1.0 }} {{ '1' == 1 }} {{ none == false }} {{ 1 != 2 }} {{ not 1 == 2 }}
{{ 1 < 'a' }}
{{ 2 in list }} {{ 'b' in 'abc' }} {{ 'name' in people[0] }} {{ 9 not in list }} {{ not 9 in list }} {{ 1 in (1, 2) }}
{{ 1 in 'abc' }}
{{ 1 in none }}
{{ 1 and 0 }} {{ 0 or 'x' }} {{ none or missing or 'y' }} {{ '' and 1 }} {{ not '' }} {{ 1 if 0 }}|{{ 1 if 0 else 2 }} {{ 'a' if 1 if 0 else 'b' }}
{{ text[0] }}{{ text[-1] }}{{ text[2:6] }}{{ text[::-1] }}{{ text[:-30] }}{{ text[99] }}{{ text[99:] }}
{{ list[0] }}{{ list[-1] }}{{ list[1:] }}{{ list[:-1] }}{{ list[::-1] }}{{ list[::2] }}{{ list[5:] }}{{ list[-99:2] }}{{ list[2:0:-1] }}{{ list['x'] }}|{{ list.0 }}{{ list[1.5] }}
{{ list[::0] }}
{{ (1, 2, 3)[1:] }} {{ (1,) }} {{ () }} {{ 1, 2 }} {{ [[], [()], {}] }} {{ {'a': 1, 'a': 2, 1: 'x', true: 'y'} }} {{ {none: 1, 2.5: 2} }}
{{ {[]: 1} }}
{{ range(5) }} {{ range(1, 9, 3) | list }} {{ range(5)[1] }} {{ range(3, 0, -1) | list }} {{ range(0) | list }} {{ range(5) | last }}
{{ range(200000) }}
{{ people | map(attribute='name') | join(', ') }} {{ people | map(attribute='pet.kind', default='-') | list }} {{ words | map('upper') | list }}
{{ people | selectattr('age', 'equalto', 30) | map(attribute='name') | list }} {{ people | rejectattr('pet') | list }} {{ people | selectattr('pet') | list | length }}
{{ list | select('odd') | list }} {{ list | reject('gt', 1) | list }} {{ [0, 1, '', 'x'] | select | list }}
{{ list | select | length }}
{{ words | sort }} {{ words | sort(reverse=true) }} {{ words | sort(case_sensitive=true) }} {{ people | sort(attribute='age,name') | map(attribute='name') | list }}
{{ [1, 'a'] | sort }}
{{ nested | dictsort | map('first') | list }} {{ {'b': 1, 'A': 2} | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value', reverse=true) }} {{ {'b': 1, 'A': 2} | dictsort(true) }}
{{ words | unique | list }} {{ words | min }} {{ words | max }} {{ list | min }} {{ list | max }} {{ list | sum }} {{ people | sum(attribute='age') }} {{ people | max(attribute='age') }} {{ [] | max }}
{% for age, group in people | groupby('age') %}{{ age }}:{{ group | length }};{% endfor %}{{ (people | groupby('age'))[0].grouper }}
{{ list | batch(2, 'x') | list }} {{ list | batch(2) | list }} {{ list | slice(2) | list }} {{ list | slice(2, 'x') | list }}
{{ list | first }} {{ list | last }} {{ [] | first }} {{ list | reverse | list }} {{ 'abc' | reverse }} {{ list | length }} {{ nested | count }} {{ 'abc' | list }} {{ nested | list }}
{{ list | join('-') }} {{ [1, none, true, 'x'] | join }} {{ 'abc' | join('.') }} {{ people | join(', ', attribute='age') }}
{{ missing | default('d') }} {{ '' | default('d') }} {{ '' | default('d', true) }} {{ none | default('d') }} {{ none | d('d', boolean=true) }}
{{ ' a ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ 'hello wORLD' | capitalize }}|{{ "hello wORLD it's" | title }}|{{ 'aBc' | upper }}|{{ 'aBc' | lower }}|{{ 'ß' | upper }}
{{ 'aaa' | replace('a', 'b', 2) }} {{ 'abc' | replace('', '-') }} {{ 12 | replace(1, 3) }}
{{ 'a\nb\n\nc\n' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent('> ', blank=true) }}|{{ '' | indent(first=true) }}
{{ 'hello world foo' | truncate(8) }} {{ 'hello world foo' | truncate(8, true, '!', 0) }} {{ 'abc' | truncate(3) }} {{ 'a b c' | wordcount }} {{ 'ab' | center(7) }}|{{ "a b/ü?&=" | urlencode }}
{{ '42' | int }} {{ '0x1F' | int(base=16) }} {{ 'x' | int }} {{ 'x' | int(-1) }} {{ 3.9 | int }} {{ '3.9' | int }} {{ -3.9 | int }} {{ '1e3' | float }} {{ 'x' | float(0.5) }} {{ ' 7 ' | int }} {{ none | int }} {{ '1_000' | int }}
{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 1234 | round(-2) }} {{ 2.1 | round(method='ceil') }} {{ 2.9 | round(0, 'floor') }} {{ 7 | round }} {{ -7 | abs }} {{ 1250 | round(-2) }} {{ 1350 | round(-2) }}
{{ '%s|%r|%d|%5.2f|%-5s|%05d|%x|%e|%g|%%|%+d' | format('a', 'b', 3.9, 2.345, 'c', 42, 255, 12345.678, 0.0001, 5) }}
{{ '%(a)s-%(b)03d' % {'a': 1, 'b': 2} }} {{ '%s' % [1, 'x'] }} {{ '%s %s' % (1, none) }} {{ '%c%c' % ('x', 65) }} {{ '%.3s|%10.4s|' % ('abcdef', 'ghijkl') }} {{ '%#x %o' % (255, 8) }} {{ '%g %g' % (1e10, 123456789.0) }}
{{ '%s' % (1, 2) }}
{{ '%d' % 'x' }}
{{ '{} {}'.format(1, 'a') }} {{ '{0}{1}{0}'.format('a', 'b') }} {{ '{x:>5}|{y:<4}|{z:^5}|'.format(x=1, y='a', z='b') }} {{ '{:05.1f} {:,} {:x} {:+d} {:.3} {:%} {!r}'.format(2.25, 1234567, 255, 3, 'abcdef', 0.5, 'q') }} {{ '{{}}'.format() }} {{ '{a[x]} {b[0]}'.format(a={'x': 1}, b=[2]) }}
{{ '{}'.format() }}
{{ '{:g} {:e} {:.2e} {:.0f} {:.3g} {:}'.format(1e7, 1.5, 12345.6, 2.5, 1234.5, 1.0) }} {{ '{:*^9}{:>+7.2f}{:=+6d}'.format('mid', 3.14159, 42) }}
{{ text.upper() }} {{ 'Ab'.swapcase() }} {{ 'ab cd'.title() }} {{ "it's".title() }} {{ 'aBC'.capitalize() }} {{ 'a-b'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'x'.partition('-') }}
{{ ' a b  c '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'a b c'.split(none, 1) }} {{ 'a b c'.rsplit(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a\nb\r\nc\n'.splitlines() }} {{ 'a\nb'.splitlines(true) }}
{{ 'a'.split('') }}
{{ ' a '.strip() }}|{{ 'xyax'.lstrip('xy') }}|{{ 'xaxy'.rstrip('yx') }}|{{ '\n a'.lstrip('\n') }}|{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}
{{ 'abcabc'.find('c') }} {{ 'abcabc'.rfind('c') }} {{ 'abc'.find('x') }} {{ 'abcabc'.count('bc') }} {{ 'abc'.count('') }} {{ 'abcabc'.find('a', 1) }} {{ 'éab'.find('b') }} {{ 'abc'.index('b') }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.startswith('b', 1) }}
{{ 'abc'.index('x') }}
{{ '-'.join(['a', 'b']) }} {{ '-'.join(words) }} {{ ''.join([]) }} {{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '.') }}|{{ 'a'.center(4) }}|{{ 'ab'.center(5, '*') }}|{{ '-5'.zfill(4) }}
{{ '-'.join([1]) }}
{{ 'a1'.isalnum() }} {{ 'a'.isalpha() }} {{ '1'.isdigit() }} {{ 'a'.islower() }} {{ 'A'.isupper() }} {{ ' '.isspace() }} {{ 'Ab Cd'.istitle() }} {{ ''.isalpha() }} {{ 'a'.isascii() }} {{ 'a_1'.isidentifier() }} {{ 'a\tb'.expandtabs() }}
{{ people[0].items() }} {{ people[2].keys() | list }} {{ people[2].values() | list }} {{ nested.get('a') | length }} {{ nested.get('x') }} {{ nested.get('x', 'd') }} {{ nested.keys() }} {{ nested.values() | length }} {% for k, v in people[2].items() %}{{ k }}={{ v }};{% endfor %}
{{ people[2] | items | list }} {{ missing | items | list }}
{{ 1 | items | list }}
{{ list.append(4) }}
{{ nested.update({}) }}
{{ list.index(2) }} {{ list.count(3) }} {{ (1, 2).index(2) }} {{ list.copy() }}
{{ 'a'.nope() }}
{{ 1() }}
{{ missing() }}
{{ nested | tojson }} {{ number | tojson(indent=2) }} {{ nested | tojson(indent=None, separators=(',', ':')) }} {{ text | tojson }} {{ text | tojson(ensure_ascii=true) }} {{ {'b': 1, 'a': [{}, []]} | tojson(sort_keys=true, indent=4) }} {{ (1, 2) | tojson }} {{ {1: 2, none: 3, true: 4} | tojson }} {{ '<>&\'' | tojson }} {{ [] | tojson(indent=2) }}
{{ missing | tojson }}
{{ 1 | tojson(color='red') }}
{{ '<a> & "b"' | e }} {{ '<a>' | safe + '<b>' }} {{ ('<a>' | e) | e }} {{ '<a>' | safe ~ '<b>' }} {{ ['<' | safe] }} {{ ('<%s>' | safe) % '<' }} {{ ('<a>' | safe).upper() + '<' }} {{ '<' | safe is string }} {{ ('<' | safe) == '<' }} {{ '<' | safe | tojson }} {{ ('<' | safe) * 2 }} {{ '<' + ('>' | safe) }}
{{ 1_000 }} {{ 0x1F }} {{ 0b11 }} {{ 0o17 }} {{ 1e3 }} {{ 1.5e-3 }} {{ 'a\x41\u00e9\n\101\q' }}|{{ "double 'q'" }} {{ true }} {{ True }} {{ none }} {{ None }} {{ false }}
{% set x = 1 %}{% for i in list %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}
{% set ns = namespace(x=0, y='a') %}{% for i in list %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }} {{ ns }} {{ ns.z is defined }}
{% set x.y = 1 %}
{% set nested.y = 1 %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}{% set e = 1, %}{{ e }}
{% set a, b = 1 %}
{% set a, b = [1, 2, 3] %}
{% set x %} block {{ 1 + 1 }} {% endset %}[{{ x }}]{% set y | upper | trim %} abc {% endset %}[{{ y }}]
{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.depth }};{% endfor %}
{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{% endfor %}
{% for i in list if i > 1 %}{{ i }}{{ loop.index }}{% else %}none{% endfor %}{% for i in list if i > 9 %}x{% else %}none{% endfor %}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in [1, [2, [3]]] recursive %}{% if i is iterable %}[{{ loop(i) }}]{% else %}{{ i }}{{ loop.depth }}{% endif %}{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for k in nested %}{{ k }}{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% if 0 %}a{% elif 1 %}b{% else %}c{% endif %}{% if missing %}a{% endif %}{% if not missing and (1 or 0) %}d{% endif %}
{% macro f(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }} {{ f(1, c=3) }} {{ f() }} {{ f(b=1, a=2) }} {{ f.name }} {{ f }}
{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, x=3) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}
{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}{% macro g() %}{{ caller(1, b=2) }}{% endmacro %}{% call(a, b) g() %}{{ a }}{{ b }}{% endcall %}
{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}{% set y = 1 %}{% macro h() %}{{ y }}{% endmacro %}{% set y = 2 %}{{ h() }}
{% macro f(x) %}{% set x = x ~ '!' %}{{ x }}{% endmacro %}{% for x in list %}{{ f(x) }}{{ x }}{% endfor %}{{ f(*['s']) }}{{ f(**{'x': 'k'}) }}
{% filter upper %}abc{{ text[:2] }}{% endfilter %}{% filter replace('a', 'b') | trim %} a {% endfilter %}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% generation %}{% set q = 1 %}gen{{ q }}{% endgeneration %}{{ q }}
{% raw %}{{ x }}{% if %}{% endraw %}|{% raw -%}  y  {%- endraw %}|{# comment {{ x }} #}|{#- strip -#} |
  {% if 1 %}  a  {% endif %}  |   {%- if 1 -%}  b  {%- endif -%}  |  {{- 'c' -}}  |{%+ if 1 +%}  d  {% endif %}
{{ {'a': {'b': 1}}.a.b }}{{ [{'x': 1}][0]['x'] }}{{ {'a': 1}['a'] }}{{ ({'a': [1, 2]}).a[1] }}{{ 'abc'[1] | upper }}{{ (1, 2) | length }}
{{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }} {{ dict({'a': 1}, b=2) }} {{ namespace(a=1).a }} {{ namespace({'a': 1}).a }}
{{ namespace(_a=1) }}
{{ raise_exception('no ' ~ 1) }}
{{ 1 | nofilter }}
{{ 1 is notest }}
{% if 0 %}{{ 1 | nofilter }}{% endif %}ok
{% nosuchtag %}
{% if 1 %}
{{ 1 +
{{ 'unclosed }}
{{ (1 }}
{% for x list %}{% endfor %}
{% include 'x' %}
{{ loop }}
{% block a %}x{% endblock %}{% block b scoped %}{% endblock b %}
{{ list.sort }}|{{ nested.items is defined }}{{ 'a'.upper is callable }}{{ nested['keys'] is defined }}{{ people[0].name.upper() }}
{{ 'x' if missing is not defined and none is none else 'y' }}{{ 1 is not none }}{{ missing is not defined }}{{ not missing is defined }}{{ 2 is gt 1 and 1 is lt 2 }}
{{ ('a' ~ 1 ~ none ~ true ~ 1.0 ~ [1] ~ missing) }} {{ 5 ~ '' | length }} {{ 'abc' | length + 1 }} {{ 10 - 3 - 2 }} {{ 2 * 3 % 4 }} {{ - 3 + 5 }} {{ +3 }} {{ not true == false }}
"""


FILE = Path(__file__).resolve().parents[2] / "crates" / "lowbit-jinja" / "tests" / "vectors.json"


def arguments(parser):
    pass


def write(_folder, _options):
    FILE.write_text(json.dumps(vectors(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def vectors() -> dict:
    sources = [line for line in SOURCES.split("\n") if line]
    sources += ["a\n{% if 1 %}\n  b\n{% endif %}\nc\n", "  {% for i in list %}  \n  {{ i }}\n  {%- endfor %}\n\n", "a\r\n{# c #}\r\nb\r\n"]
    sources += ["{% if 1 -%}\n\n x \n\n{%- endif %}\n", "x\n   {{ 1 }}\n\t{# c #}\n\t{%+ if 1 %}\ny{% endif %}"]
    results = []
    for source in sources:
        case = {"source": source}
        try:
            rendered, _ = render_jinja_template([[]], chat_template=source, **VALUES)
            case["text"] = rendered[0]
        except Exception as error:  # Whatever Python raises inside of a template.
            case["error"] = f"{type(error).__name__}: {error}"
        results.append(case)
    return {"variables": VALUES, "cases": results}
