"""Requests that start turns. Their fields include the engine's options, under the names of each API."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

from pydantic import Field, create_model

from tenuto.base.errors import ContextExceeded, TenutoError
from tenuto.base.options import OPTIONS, TurnOptions, TurnParams, turn_params
from tenuto.base.sampling import MAX_SEED
from tenuto.base.tools.definitions import NO_TOOLS, ModelHabits
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import TurnInput
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.shared.grammars import GrammarField
from tenuto.serve.shared.schemas import Object, field_of, type_of
from tenuto.serve.shared.settings import Tenant

RUN_FIELD: Any = Field(None, description="Helps to find the session of a conversation that is sent again.")
"""A field with a name of the client's conversation, or of the client."""

R = TypeVar("R", bound="TurnRequest")


class ContextLengthExceeded(ContextExceeded):
    """`ContextExceeded` with the code that OpenAI's clients expect."""

    code = "context_length_exceeded"


class TurnRequest(Object):
    """A request that starts turns.

    `apis`: the APIs whose names the fields have, in order of preference. `setting`: the fields that set each option, in
    order of precedence; filled by `with_options`. `usual`: the API's own values of options that are not given.
    `unset_below`: fields in which numbers below these are the same as no value. `input_field`: name of the field with
    the input. `too_long`: text by which the API's clients recognize an input that exceeds the model's context of
    `{limit}` tokens; empty if they do not.
    """

    apis: ClassVar[tuple[str, ...]] = ()
    setting: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    usual: ClassVar[Mapping[str, Any]] = {"temperature": 1.0}
    unset_below: ClassVar[Mapping[str, int]] = {}
    input_field: ClassVar[str] = "input"
    too_long: ClassVar[str] = ""

    @property
    def tool_use(self) -> ToolUse | None:
        """The functions that the answer may call, if the request mentions tools. Raises `InvalidRequest`."""
        return None

    def run_name(self) -> str | None:
        """Returns the name that the client gives to its conversation or to itself, if any; see `Runs`."""
        return None

    def grammar_field(self) -> GrammarField | None:
        """Returns the grammar for the answer's text and the field that asks for it, if any. Raises `InvalidRequest`."""
        return None

    def given(self) -> dict[str, Any]:
        """Returns the options that the request sets, under the engine's names and with its values. `top_k` -1 means 0
        in some APIs, and a seed may be any integer."""
        given = {}
        for option, names in self.setting.items():
            name = self._field_of(names)
            value = getattr(self, name)
            if value is not None and (name not in self.unset_below or value >= self.unset_below[name]):
                given[option] = value
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])
        if "seed" in given:
            given["seed"] &= MAX_SEED
        return given

    def options(self) -> TurnOptions:
        """Returns the given options and the API's defaults, under the engine's names, with a seed if the turn samples.
        Raises `InvalidRequest`."""
        options = {**self.usual, **self.given()}
        if options["temperature"]:
            options.setdefault("seed", secrets.randbelow(MAX_SEED + 1))
        if (asked := self.grammar_field()) is not None:
            options["grammar"] = asked.grammar
        return cast("TurnOptions", options)

    def params(self, habits: ModelHabits) -> TurnParams:
        """Returns the options of the turn, for a model with these `habits`. Raises `InvalidRequest`."""
        options, use = self.options(), self.tool_use
        if use is None:
            return turn_params(options)
        options["grammar"] = use.grammar(habits, cast("Grammar | None", options.get("grammar")))
        return turn_params(options, use.marks(habits))

    def start(self, tenant: Tenant, given: TurnInput, habits: ModelHabits, **more: Any) -> StartTurn:
        """Returns the message that starts the turn with the input `given`. `more`: other fields of `StartTurn`. Raises
        `InvalidRequest`."""
        params, use = self.params(habits), self.tool_use
        tools = use.definitions if use is not None else NO_TOOLS
        start = {"kind": "turn", "tenant": tenant.name, "limits": tenant.limits, **more}
        return StartTurn(input=given, params=params, tools=tools, **start)

    def field(self, option: str | None) -> str | None:
        """Returns the name, as spelled by the client, of the field that sets the engine's `option`."""
        if option == "input":
            return self.input_field
        if option == "grammar":
            asked = self.grammar_field()
            return asked.name if asked is not None else "tools"
        names = self.setting.get(option) if option is not None else None
        return self._field_of(names) if names is not None else option

    def _field_of(self, names: tuple[str, ...]) -> str:
        """Returns the first of these fields that is given, or else the last one."""
        return next((name for name in names if getattr(self, name) is not None), names[-1])

    @contextmanager
    def naming(self, limit: int) -> Iterator[None]:
        """Makes errors raised inside the block name fields as the client does. `limit`: length of the context in
        tokens."""
        try:
            yield
        except ContextExceeded as error:
            if not self.too_long:
                error.param = self.field(error.param)
                raise
            said = f"{self.too_long.format(limit=limit)}: {error.message}"
            raise ContextLengthExceeded(said, param=self.field("input"), details=error.details) from None
        except TenutoError as error:
            error.param = self.field(error.param)
            raise


def with_options(*names: str, **described: str) -> Callable[[type[R]], type[R]]:
    """Returns a class decorator that adds engine options as optional fields with their bounds and descriptions. It adds
    `names`, and all options with special names in the class's `apis`. `described`: options with other descriptions.
    Fields that the class has already stay as they are."""

    def add(model: type[R]) -> type[R]:
        chosen = (*names, *described, *(option for option in OPTIONS if aliases_of(option, model.apis)))
        setting = {option: aliases_of(option, model.apis) or (option,) for option in chosen}
        fields: dict[str, Any] = {
            name: (type_of(option) | None, field_of(option, described.get(option)))
            for option, own in setting.items()
            for name in own
            if name not in model.model_fields or option in described
        }
        made = create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )
        made.setting = {**model.setting, **setting}
        return made

    return add


def options_but(*names: str) -> tuple[str, ...]:
    """Returns all options of the engine except these."""
    return tuple(option for option in OPTIONS if option not in names)


def aliases_of(option: str, apis: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the option's names in the first of these APIs that has special names for it; empty if all use ours."""
    names: Mapping[str, tuple[str, ...]] = OPTIONS[option].metadata["names"]
    return next((names[api] for api in apis if api in names), ())


def text_in(given: Any, name: str) -> str | None:
    """Returns the text of this name in an object of a request; `None` if it has no such text."""
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, str) else None
