"""The chat templates of served models: their own or a chosen one, and one that describes tools.

For requests with tools, a model whose template supports none gets a second template: `generic_tools.jinja` before its
own. It writes tools, calls and results into plain messages, in Hermes format, by which `tool_format` knows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import ConfigError, InvalidRequestError
from common.text.tokenizer import Tokenizer
from common.wings import call_wing
from router.chat_templates.settings import BUILT_IN, ChatTemplateSettings
from router.config import RouterConfig

MAX_CHARS = 1 << 20
_TAKES_TOOLS = re.compile(r"\btools\b")
_GENERIC_TOOLS = (Path(__file__).parent / "generic_tools.jinja").read_text(encoding="utf-8")
_GENERIC_FORMAT = "hermes"  # of the calls that the generic template asks for
_PROBE = "a5ba40"


def with_templates(config: RouterConfig, tokenizers: Sequence[Tokenizer]) -> list[Tokenizer]:
    """Return the tokenizers of all models with the templates that they are served with. Raises ConfigError."""
    chosen = config.of(ChatTemplateSettings).chat_template
    if chosen and len(tokenizers) > 1:
        raise ConfigError("--chat-template replaces the template of one model, but --models names several")
    own = {"default": read_template(chosen)} if chosen else None
    parser: str = call_wing("router.tools.settings:tool_call_parser", config) or "auto"
    return [_prepared(tokenizer, own, parser) for tokenizer in tokenizers]


def read_template(name: str) -> str:
    """Return the text of a built-in template or of a file. Raises ConfigError."""
    path = BUILT_IN.get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"--chat-template {name!r} cannot be read ({error}); built in are {known}") from None
    if len(text) > MAX_CHARS:
        raise ConfigError(f"--chat-template {name!r} has more than {MAX_CHARS} characters")
    return text


def _prepared(tokenizer: Tokenizer, chosen: Mapping[str, str] | None, parser: str) -> Tokenizer:
    if chosen is not None:
        tokenizer = tokenizer.with_templates(chosen)
    default = tokenizer.templates.get("default", "")
    if not default or "tool_use" in tokenizer.templates or _TAKES_TOOLS.search(default):
        return tokenizer
    if parser not in ("auto", _GENERIC_FORMAT):
        raise ConfigError(
            f"--tool-call-parser {parser}: a model's chat template takes no tools; the prompt that describes them "
            f"instead asks for calls in the format {_GENERIC_FORMAT}. Leave the flag out, or name a template with "
            "tools (--chat-template)"
        )
    role = "system" if _shows_system(tokenizer) else "user"
    generic = f"{{%- set tools_role = '{role}' -%}}{_GENERIC_TOOLS}{default}"
    return tokenizer.with_templates({**tokenizer.templates, "tool_use": generic})


def _shows_system(tokenizer: Tokenizer) -> bool:
    """Whether a template shows system messages; some refuse them, others leave them out."""
    messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
    try:
        return _PROBE in tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special=False)
    except InvalidRequestError:
        return False
