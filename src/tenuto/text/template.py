"""Runs a model's chat template: sandboxed Jinja with the helpers that templates written for `transformers` expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Never

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tenuto.base.errors import InvalidRequest, ModelError


class Template:
    """A compiled chat template. `variables` are visible in every rendering. `knows_tools`: its source refers to
    `tools`."""

    def __init__(self, source: str, variables: Mapping[str, str], local_time: Callable[[], datetime]) -> None:
        """Raises `ModelError` if `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            autoescape=False,  # the output is tokens for a model, not a web page
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: local_time().strftime(layout)
        try:
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"line {error.lineno} of the chat template: {error.message}") from None
        self._variables = dict(variables)
        self.no_tools: list[Any] | None = None
        """The value of `tools` in conversations without tools."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders `messages`, with `generate` up to where the assistant begins to speak. `variables`: further variables
        of this rendering. Raises `InvalidRequest` if the template refuses the messages or fails."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=generate,
                tools=list(tools) or self.no_tools,
                documents=None,
                **self._variables,
                **variables,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program from elsewhere and may raise anything
            raise InvalidRequest(f"the model's chat template cannot render these messages: {error}") from None


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks a model's output for training with `transformers`, and ignores it."""

    tags = {"generation"}  # noqa: RUF012 - the library's class has no annotation for it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parses a `{% generation %}` block into the statements between its tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter writes `<`, `>`, `&` and `'` as escapes, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
