"""Chat templates that take tools, with the sentences by which real ones show a model how to write calls."""

from __future__ import annotations

HERMES_TEMPLATE = r"""{%- if tools %}
    {{- "<tools>" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "</tools>\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>\n" }}
{%- endif %}
{%- for message in messages %}
    {{- "[" + message.role + "]" + message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "[assistant]" }}{%- endif %}
"""  # noqa: E501 - as Qwen writes it

LLAMA3_TEMPLATE = r"""{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- "[" + message.role + "]" + message.content }}
{%- endfor %}
"""


def call_text(name: str, arguments: str) -> str:
    """Write a call in Hermes' format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
