"""Chat templates as checkpoints ship them, rendered by a sandboxed jinja2 with the names transformers gives them."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nibblelm.errors import TokenizerError

if TYPE_CHECKING:
    from jinja2 import Template


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render `template` with `messages` and `variables` (add_generation_prompt, bos_token, tools ...).

    Raises TokenizerError where the template does not parse, fails, takes more time or memory than a chat can need, or
    refuses the messages by raise_exception.
    """
    import jinja2

    from nibblelm.tokenizer.template_limits import SOURCE, limits

    if len(template) > SOURCE:
        raise TokenizerError(f"the chat template has {len(template)} characters; at most {SOURCE} are read")
    limits()
    try:
        return _compiled(template).render(messages=list(messages), **variables)
    except TokenizerError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template does not parse: {error.message} (line {error.lineno})") from error
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template refused the messages: {error}") from error
    except Exception as error:  # a template is a program of a stranger: whatever it raises is its failure
        raise TokenizerError(f"the chat template failed: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> "Template":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    from nibblelm.tokenizer.template_limits import LimitedEnvironment, strftime_now

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here only its body counts."""

        tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja2's own filter escapes HTML, which no template wants
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.seal()
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)
