"""llama.cpp's requests for completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_NEW_TOKENS
from tenuto.base.sampling import MAX_BIASES, MAX_TOKEN_ID
from tenuto.base.tools.grammar import Grammar
from tenuto.serve.shared.grammars import GrammarField, Schema, of_rules, only_one
from tenuto.serve.shared.llama_fields import FINE_TUNING, LEFT, SAMPLERS
from tenuto.serve.shared.objects import ForeignObject
from tenuto.serve.shared.prompt_forms import PromptField, several
from tenuto.serve.shared.schemas import Items, Object
from tenuto.serve.shared.turn_request import TurnRequest, options_but, with_options

NEVER = -100.0
"""The bias that keeps a token from being sampled."""


def _mapping(given: Any) -> Any:
    """Returns an object, or pairs, of tokens or texts and their biases as a mapping; the bias `false` forbids."""
    if not isinstance(given, list | dict):
        return given
    if len(given) > MAX_BIASES:
        raise ValueError(f"there are {len(given)} entries; allowed: at most {MAX_BIASES}")
    if isinstance(given, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str) for pair in given):
            raise ValueError("an entry is not a pair; allowed: a token id or a text, and a number or false")
        given = {key: NEVER if bias is False else bias for key, bias in given}
    return {int(key) if TOKEN.fullmatch(str(key)) else key: bias for key, bias in given.items()}


TOKEN = re.compile(r"\d{1,10}", re.ASCII)
"""Matches a token id as an object's key, where JSON allows only strings."""
Biases = Annotated[dict[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | str, float], BeforeValidator(_mapping)]


@with_options(*options_but("grammar", "input_logprobs"), temperature="0.8 if not given.")
class Completing(ForeignObject, TurnRequest):
    """The options of a completion."""

    apis = ("llama.cpp", "openai")
    usual: ClassVar[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    unset_below: ClassVar[dict[str, int]] = {"n_predict": 0, "max_tokens": 0, "n_probs": 1, "seed": 0}
    too_long = "the request exceeds the available context size, {limit} tokens"
    ignored = frozenset((*FINE_TUNING, "model", "n_indent", "t_max_prompt_ms"))
    undone = LEFT
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SAMPLERS,
        "post_sampling_probs": (None, False),
        "t_max_predict_ms": (None, 0),
        "n_cmpl": (None, 1),
    }

    stream: bool | None = None
    n_predict: int | None = Field(
        None, ge=-1, le=MAX_NEW_TOKENS, description="Maximum number of output tokens; -1: as many as fit."
    )
    max_tokens: int | None = Field(None, ge=-1, le=MAX_NEW_TOKENS, description="Another name of `n_predict`.")
    seed: int | None = Field(None, description="-1: chosen by the server.")
    top_k: int | None = Field(None, ge=-1, description="40 if not given; 0 keeps all.")
    logit_bias: Biases | None = Field(
        None, description="By token id, or by a text, for each of its tokens; as an object or as pairs."
    )
    grammar: str | None = Field(None, description="A grammar as EBNF, which is enforced.")
    json_schema: Schema | None = Field(None, description="A JSON schema, which is enforced.")
    return_tokens: bool | None = Field(None, description="Show the token ids of the answer.")
    timings_per_token: bool | None = Field(None, description="Show times in every chunk of a stream.")
    response_fields: Items[str] | None = Field(None, description="The only fields of a whole answer; / goes deeper.")

    def grammar_field(self) -> GrammarField | None:
        return only_one(
            ("grammar", of_rules, self.grammar or None), ("json_schema", Grammar.of_schema, self.json_schema)
        )


class Snippet(Object):
    """Another file, or a part of it."""

    text: str
    filename: str = Field("tmp", max_length=4096)


class InfillBody(Completing):
    """A text to fill in the middle: the model writes what follows `input_prefix` and `prompt`, up to `input_suffix`."""

    input_field = "input_prefix"

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Items[Snippet] | None = None


class CompletionBody(Completing):
    """Texts or tokens to continue. The spelling of a control token in a text becomes that token."""

    input_field = "prompt"

    prompt: PromptField

    @property
    def several(self) -> bool:
        """Whether the request has a list of prompts, so that the answer is a list."""
        return several(self.prompt)

    def check(self) -> None:
        """Raises `InvalidRequest` for fields that do not go together."""
        if self.several and self.stream:
            raise InvalidRequest("there are several prompts with stream; allowed: one, or no stream", param="prompt")
