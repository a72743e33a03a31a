"""Conversion of commands' input to tokens. Not for use in the engine's thread, which it would hold up."""

from __future__ import annotations

from array import array
from dataclasses import replace

from tenuto.base.checks import MAX_COUNT
from tenuto.base.errors import ContextExceeded
from tenuto.base.options import TurnParams
from tenuto.base.turns import Message, TurnInput
from tenuto.base.wire.messages import Draft, StartTurn, Tokenize
from tenuto.engine.thread.rendering import Basis, Prepared, Renderer
from tenuto.text.constraint import Constraint
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.patterns import stop_patterns
from tenuto.text.prompt import Prompt, parse_input
from tenuto.text.tokenizer import Tokenizer

MAX_COUNTED = 2**20
"""Maximum number of characters of input that is tokenized but not computed, for contexts of up to 2^17 tokens. Encoding
a character takes about 150 bytes of memory."""
CHARACTERS_A_TOKEN = 8
"""The same for each token of longer contexts."""


class Preparer:
    """Parses, encodes and renders the input of commands, and compiles their grammars."""

    def __init__(
        self,
        renderer: Renderer,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler | None,
        context_length: int,
    ) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._context_length = context_length
        self._counted = max(MAX_COUNTED, CHARACTERS_A_TOKEN * context_length)

    def to_compile(self, command: StartTurn | Draft) -> int:
        """Returns the number of characters of the command's grammar if it must still be compiled, otherwise 0."""
        grammar = command.params.grammar if isinstance(command, StartTurn) else None
        if grammar is None or self._grammars is None or self._grammars.has(grammar):
            return 0
        return max(1, len(grammar.source))

    def prepare(self, command: StartTurn | Draft, basis: Basis, *, closed: bool = False) -> Prepared:
        """Returns the tokens that the command appends to `basis`, the state of its session, and its grammar. `closed`:
        as in `Tokenize`. Raises the errors of `Renderer.prepare` and `GrammarCompiler.constraint`."""
        if not isinstance(command, StartTurn):
            prompt = parse_input(command.input, self._tokenizer, basis.room(generate=False), basis.last_token)
            return self._renderer.prepare(basis, prompt, generate=False)
        stop_patterns(command.params.stop_regex)  # compiles them before the engine's thread needs them
        if command.kind == "regenerate":
            prepared = Prepared(basis, array("i"), None)
        else:
            if command.most is not None:
                self._require_countable(command)
                basis = replace(basis, limit=MAX_COUNT)
            generate = _generates(command)
            prompt = self._prompt(command, basis, generate=generate)
            if command.params.pooling is not None:
                prompt = self._with_end(prompt)
            prepared = self._renderer.prepare(
                basis,
                prompt,
                generate=generate and not (command.continues or command.closed),
                tools=command.tools,
                variables=command.variables,
                closed=closed or command.closed,
            )
            if command.most is not None:
                kept = prepared.tokens[-command.most :] if command.most > 0 else prepared.tokens[: -command.most]
                prepared = prepared._replace(tokens=kept)
        if command.params.prediction and self._tokenizer is not None:
            prepared = prepared._replace(prediction=self._prediction(command.params.prediction))
        return prepared._replace(constraint=self.constraint(command.params))

    def constraint(self, params: TurnParams) -> Constraint | None:
        """Returns a new constraint for the grammar and the bad words of a turn, if it has any. Raises the errors of
        `GrammarCompiler.constraint`."""
        if not params.constrained or self._grammars is None:
            return None
        return self._grammars.constraint(params.grammar, params.bad_words)

    def _prediction(self, text: str) -> array[int]:
        """Returns the tokens of a predicted text, as far as a context can be."""
        assert self._tokenizer is not None  # checked by the caller
        return array("i", self._tokenizer.encode(text[: CHARACTERS_A_TOKEN * self._context_length]))

    def tokens(self, request: Tokenize) -> array[int]:
        """Returns the tokens of a `Tokenize` request. Raises `ContextExceeded` and the errors of `Renderer.prepare`."""
        self._require_countable(request)
        start = StartTurn(
            kind="turn",
            tenant="",
            input=request.input,
            markup=request.markup,
            tools=request.tools,
            variables=request.variables,
            params=TurnParams() if request.generate else TurnParams().input_alone,
        )
        return self.prepare(start, Basis.opening(MAX_COUNT), closed=request.closed).tokens

    def _require_countable(self, request: StartTurn | Tokenize) -> None:
        """Raises `ContextExceeded` if the input is too long to encode more of it than is computed."""
        size = size_of(request.input) + len(request.tools.source) + len(request.variables.source)
        if size > self._counted:
            raise ContextExceeded(
                f"the input has {size} characters; allowed where it is only tokenized: {self._counted}"
            )

    def _prompt(self, command: StartTurn, basis: Basis, *, generate: bool) -> Prompt:
        tokenizer = self._tokenizer
        leaves_out = not command.keep_bos and not basis.empty
        room = basis.room(generate=generate, spare=int(leaves_out))
        if command.markup and isinstance(command.input, str) and tokenizer is not None:
            room.require(tokenizer.least_tokens(command.input))
            prompt = Prompt(
                tokens=tuple(tokenizer.encode(command.input, special=True, before=tokenizer.before(basis.last_token))),
                text=True,
            )
        else:
            prompt = parse_input(command.input, tokenizer, room, basis.last_token)
        return self._without_bos(prompt) if leaves_out else prompt

    def _with_end(self, prompt: Prompt) -> Prompt:
        """Appends the token that the model expects behind a text to be embedded."""
        if self._tokenizer is None or self._tokenizer.end_id is None or not prompt.text:
            return prompt
        return replace(prompt, tokens=(*prompt.tokens, self._tokenizer.end_id))

    def _without_bos(self, prompt: Prompt) -> Prompt:
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.adds_bos or prompt.tokens[:1] != (tokenizer.bos_id,):
            return prompt
        return replace(prompt, tokens=prompt.tokens[1:])


def size_of(given: TurnInput) -> int:
    """Returns the number of characters of text or messages, or the number of token ids. Each message adds a small
    overhead."""
    if isinstance(given, str):
        return len(given)
    if given and isinstance(given[0], Message):
        return sum(part.size for part in given if isinstance(part, Message))
    return len(given)


def _generates(command: StartTurn) -> bool:
    """Whether the command generates an answer after its input."""
    if command.session is None:
        return command.params.generates
    return command.kind == "turn"
