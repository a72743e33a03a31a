"""The messages that clients of OpenAI's Realtime send."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_NEW_TOKENS
from tenuto.serve.openai.response_schemas import Item, Metadata
from tenuto.serve.openai.tools import FlatNamedTool, FlatTool
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import Messages, ModelName, field_of, unsupported
from tenuto.serve.shared.undone import ToolList, of_type

ItemId = Annotated[str, Field(min_length=1, max_length=64)]
TEXT_ONLY = ["text"]


class RealtimeItem(Item):
    """A message, a call, or the result of a call."""

    ignored: ClassVar[frozenset[str]] = Item.ignored - {"id"} | {"object"}

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: ItemId | None = None


class InputItem(RealtimeItem):
    """An item of a response's own input; with `item_reference`, one of the conversation."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"  # type: ignore[assignment] # fewer


class AnswerSettings(ForeignObject):
    """The settings of responses. Those of one response replace those of the session."""

    undone: ClassVar[dict[str, tuple[Any, ...]]] = {"reasoning": NOTHING}
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {"audio": NOTHING, "prompt": NOTHING}

    instructions: str | None = Field(None, description="A system message before the conversation.")
    output_modalities: Annotated[list[str], Field(max_length=2)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | Literal["inf"] | None = None
    temperature: float | None = field_of("temperature", "1 if not given.")
    top_p: float | None = field_of("top_p")
    seed: int | None = field_of("seed")
    tools: ToolList[Annotated[FlatTool, of_type("function")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("output_modalities")
    @classmethod
    def _text(cls, given: list[str] | None) -> list[str] | None:
        if given is not None and given != TEXT_ONLY:
            raise unsupported("", f'is {given}, and this server writes text only; allowed: ["text"]')
        return given

    def definitions(self) -> list[dict[str, Any]]:
        """Returns the definitions of the functions for the model."""
        return [tool.definition() for tool in self.tools or ()]

    def options(self) -> dict[str, Any]:
        """Returns the fields of a native turn that these settings determine."""
        choice = {"name": self.tool_choice.name} if isinstance(self.tool_choice, FlatNamedTool) else self.tool_choice
        given = {
            "max_new_tokens": self.max_output_tokens if self.max_output_tokens != "inf" else None,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "tools": self.definitions(),
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return {name: value for name, value in given.items() if value is not None}

    def view(self) -> dict[str, Any]:
        """Returns the settings in the form for clients."""
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, FlatNamedTool) else self.tool_choice
        return {
            "instructions": self.instructions or "",
            "output_modalities": TEXT_ONLY,
            "max_output_tokens": self.max_output_tokens or "inf",
            "tools": [{"type": "function", **each} for each in self.definitions()],
            "tool_choice": choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }


class RealtimeSession(AnswerSettings):
    """The settings of a session."""

    ignored: ClassVar[frozenset[str]] = frozenset({"object", "id", "expires_at", "include", "tracing"})
    undone: ClassVar[dict[str, tuple[Any, ...]]] = {"reasoning": NOTHING, "truncation": (None, "disabled")}

    type: Literal["realtime"] = "realtime"
    model: ModelName = None


class ResponseSettings(AnswerSettings):
    """The settings of one response."""

    conversation: Literal["auto", "none"] | None = Field(
        None, description="With `none` the response does not become part of the conversation."
    )
    input: Messages[InputItem] | None = Field(None, description="Items to answer instead of the conversation.")
    metadata: Metadata | None = None


class ClientEvent(ForeignObject):
    """A message of a client. `event_id` is named by the error that refuses it."""

    type: str
    event_id: str = Field("", max_length=512)


class SessionUpdate(ClientEvent):
    """New settings; those that are not given stay."""

    session: RealtimeSession


class ItemCreate(ClientEvent):
    """An item for the conversation. `previous_item_id`: the item to put it after, `root` for the beginning."""

    item: RealtimeItem
    previous_item_id: str | None = Field(None, max_length=64)


class ItemEvent(ClientEvent):
    """An item to show or to remove."""

    item_id: str = Field(max_length=64)


class ItemTruncate(ItemEvent):
    """The part of the assistant's message that the user has heard or read."""

    content_index: int = Field(0, ge=0, le=0)
    audio_end_ms: int = Field(0, ge=0, description="Text has no time: allowed is 0, unless `text_end` is given.")
    text_end: int | None = Field(None, ge=0, description="Number of characters of the text to keep.")

    def kept(self) -> int:
        """Returns the number of characters to keep. Raises `InvalidRequest`."""
        if self.text_end is None and self.audio_end_ms:
            raise InvalidRequest(
                f"audio_end_ms is {self.audio_end_ms}, and the item is text; allowed: 0, or text_end, the number of"
                " characters to keep",
                param="audio_end_ms",
            )
        return self.text_end or 0


class ResponseCreate(ClientEvent):
    """A response to write."""

    response: ResponseSettings | None = None


class ResponseCancel(ClientEvent):
    """The end of a response that is being written."""

    response_id: str | None = Field(None, max_length=64)
