"""Input to tokens, as the commands that bring it want it. For any thread but the engine's."""

from __future__ import annotations

from dataclasses import replace

from tenuto.base.messages import Draft, StartTurn
from tenuto.engine.rendering import Basis, Prepared, Renderer
from tenuto.text.prompt import Prompt, parse_input
from tenuto.text.tokenizer import Tokenizer


class Preparer:
    """Parses, encodes and renders the input of commands."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer | None) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    def prepare(self, command: StartTurn | Draft, basis: Basis) -> Prepared:
        """The tokens that the command appends to what `basis` says. Raises as `Renderer.prepare`."""
        generate = _generates(command)
        if isinstance(command, StartTurn):
            prompt = self._prompt(command, basis, generate=generate)
        else:
            prompt = parse_input(command.input, self._tokenizer, basis.room(generate=False))
        return self._renderer.prepare(basis, prompt, generate=generate)

    def _prompt(self, command: StartTurn, basis: Basis, *, generate: bool) -> Prompt:
        tokenizer = self._tokenizer
        leaves_out = not command.keep_bos and not basis.empty
        room = basis.room(generate=generate, spare=int(leaves_out))
        if command.markup and isinstance(command.input, str) and tokenizer is not None:
            room.require(tokenizer.least_tokens(command.input))
            prompt = Prompt(tokens=tuple(tokenizer.encode(command.input, special=True)), text=True)
        else:
            prompt = parse_input(command.input, tokenizer, room)
        return self._without_bos(prompt) if leaves_out else prompt

    def _without_bos(self, prompt: Prompt) -> Prompt:
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.adds_bos or prompt.tokens[:1] != (tokenizer.bos_id,):
            return prompt
        return replace(prompt, tokens=prompt.tokens[1:])


def _generates(command: StartTurn | Draft) -> bool:
    """Whether an answer is asked for after the input."""
    if isinstance(command, Draft):
        return False
    if command.session is None:
        return command.params.max_new_tokens != 0
    return command.kind == "turn"
