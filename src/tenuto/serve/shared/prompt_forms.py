"""The forms in which llama.cpp's requests give texts and tokens, resolved to what a turn takes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tenuto.base.errors import InvalidRequest
from tenuto.base.turns import TurnInput
from tenuto.base.wire.messages import Tokenize
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.embeddings import MAX_INPUTS
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import Items, Messages, Prompts, TokenId, required
from tenuto.serve.shared.settings import Tenant

MAX_TEXTS = 256
"""Maximum number of texts among the tokens of one prompt: each is tokenized by itself."""


class Part(ForeignObject):
    """A part of a text."""

    has_kinds = True

    type: Literal["text"]
    text: str


class PromptObject(ForeignObject):
    """A text as an object, which could also have pictures: `prompt_string`, or the parts in `content`."""

    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {"multimodal_data": NOTHING}

    prompt_string: str | None = None
    content: Messages[Part] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt_string is None) == (self.content is None):
            raise required("one of prompt_string and content")
        return self

    @property
    def text(self) -> str:
        """The text."""
        return "".join(part.text for part in self.content or ()) if self.prompt_string is None else self.prompt_string


Mixed = Annotated[list[TokenId | str], Field(fail_fast=True, max_length=2**20)]
"""Token ids and texts, one after the other."""
Prompt = str | Items[TokenId] | PromptObject
PromptField = Prompt | Prompts[Prompt | Mixed] | Mixed
Inputs = Prompt | Annotated[list[Prompt | Mixed], Field(fail_fast=True, max_length=MAX_INPUTS)] | Mixed
"""Fields of requests: one prompt or several, and as many as embeddings take."""


def several(given: PromptField | Inputs) -> bool:
    """Whether a request gives a list of prompts, which itself contains no token ids."""
    return isinstance(given, list) and bool(given) and not any(isinstance(part, int) for part in given)


async def resolved(edge: Edge, tenant: Tenant, given: PromptField | Inputs) -> list[TurnInput]:
    """Returns the prompts, one or more. Control tokens spelled out in texts among tokens are such. Raises
    `InvalidRequest`."""
    prompts: Sequence[Any] = given if several(given) and isinstance(given, list) else [given]
    return [await _resolved(edge, tenant, each) for each in prompts]


async def _resolved(edge: Edge, tenant: Tenant, prompt: Prompt | list[int | str]) -> TurnInput:
    if isinstance(prompt, PromptObject):
        return prompt.text
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        return prompt  # type: ignore[return-value]
    if (texts := sum(isinstance(part, str) for part in prompt)) > MAX_TEXTS:
        raise InvalidRequest(f"a prompt has {texts} texts among its tokens; allowed: at most {MAX_TEXTS}")
    tokens: list[int] = []
    for part in prompt:
        tokens += [part] if isinstance(part, int) else await tokens_of(edge, tenant, part, first=not tokens)
    return tokens


async def tokens_of(edge: Edge, tenant: Tenant, text: str, *, first: bool = False) -> list[int]:
    """Returns the tokens of a text, with the token that begins a text only if it comes `first`."""
    asked = Tokenize(tenant=tenant.name, input=text, markup=True)
    found = array("i", await edge.link.call(asked)).tolist()
    begun = edge.model.adds_bos and found[:1] == [edge.model.bos_id]
    return found[1:] if begun and not first else found


async def biases(edge: Edge, tenant: Tenant, given: Mapping[int | str, float]) -> dict[int, float]:
    """Returns the biases of tokens. That of a text is the bias of each of its tokens."""
    found: dict[int, float] = {}
    for key, bias in given.items():
        found |= dict.fromkeys([key] if isinstance(key, int) else await tokens_of(edge, tenant, key), bias)
    return found
