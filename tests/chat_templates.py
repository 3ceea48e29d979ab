"""Chat templates like those of common models, and the conversations that each of them accepts."""

from __future__ import annotations

from typing import NamedTuple

SPECIALS = ("<|im|>", "<|end|>", "[INST]", "[/INST]", '<|"|>')
_LOOP = "{% for m in messages %}<|im|>{{ m['role'] }}\n{{ CONTENT }}<|end|>\n{% endfor %}"
_ASKS = "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
_TAKES_TURNS = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('they take turns') }}{% endif %}"
)
_SYSTEM_APART = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
)
# Tool calls of Hermes and Qwen 2.5: a tag for each call.
CALL_TAGS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if not loop.first else '' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
# Tool calls of Mistral: a list.
CALL_LIST = (
    "{% if m.tool_calls %}[CALLS] [{% for c in m.tool_calls %}{{ ', ' if not loop.first else '' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]{% endif %}'
)
_LISTED = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}{% for m in messages %}<|im|>{{ m['role'] }}\n"
_SAID = "{{ m['content'] }}<|end|>\n{% endfor %}" + _ASKS


class Template(NamedTuple):
    """A chat template.

    alternates: it rejects conversations in which user and assistant do not alternate. system: it accepts a system
    message. tools: it accepts tools.
    """

    text: str
    alternates: bool = False
    system: bool = True
    tools: bool = False


TEMPLATES = {
    # ChatML, SmolLM2, Qwen 2.5: contents unchanged.
    "chatml": Template(_LOOP.replace("CONTENT", "m['content']") + _ASKS),
    # Llama 3.2: today's date, contents trimmed.
    "dated": Template(
        "{{ bos_token }}Today: {{ strftime_now('%d %b %Y') }}\n"
        + _LOOP.replace("CONTENT", "m['content'] | trim")
        + _ASKS
    ),
    # Gemma 2: no system text, turns alternate, contents trimmed.
    "refuses": Template(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ bos_token }}{% for m in messages %}"
        + _TAKES_TURNS
        + "<|im|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
        + _ASKS,
        alternates=True,
        system=False,
    ),
    # Gemma 3: the system text opens the first user turn.
    "merges": Template(
        _SYSTEM_APART
        + "{% for m in rest %}"
        + _TAKES_TURNS
        + "<|im|>{{ m['role'] }}\n{% if loop.first and first %}{{ first + '\n\n' }}{% endif %}"
        + "{{ m['content'] | trim }}<|end|>\n{% endfor %}"
        + _ASKS,
        alternates=True,
    ),
    # Mistral 7B v0.3: the system text is in the last user turn; only answers are trimmed.
    "last": Template(
        _SYSTEM_APART
        + "{{ bos_token }}{% for m in rest %}"
        + _TAKES_TURNS
        + "{% if m['role'] == 'user' %}[INST] {{ first + '\n\n' if loop.last and first else '' }}{{ m['content'] }}"
        + "[/INST]{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}",
        alternates=True,
    ),
    # Llama 2: system and question are stripped together.
    "strips": Template(
        _SYSTEM_APART
        + "{% for m in rest %}"
        + _TAKES_TURNS
        + "{% set said = '<<' + first + '>>\n\n' + m['content'] if loop.first and first else m['content'] %}"
        + "{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ said.strip() }} [/INST]"
        + "{% else %} {{ said.strip() }} </s>{% endif %}{% endfor %}",
        alternates=True,
    ),
    # Qwen 3: the thinking parts of earlier answers are left out.
    "thinks": Template(
        "{% for m in messages %}{% set said = m['content'] %}{% if m['role'] == 'assistant' and '</think>' in said %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im|>{{ m['role'] }}\n{{ said }}<|end|>\n{% endfor %}" + _ASKS
    ),
    # The demo model: words separated by single spaces.
    "one line": Template(
        "{% for m in messages %}{{ m.role }}: {{ m.content.split() | join(' ') }} {% endfor %}answer:"
    ),
    "calls": Template(_LISTED + CALL_TAGS + _SAID, tools=True),
    "list of calls": Template(_LISTED + CALL_LIST + _SAID, tools=True),
}
