"""The settings, besides the model, on which the worst case of a turn's memory depends."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.base.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings, besides the model, on which the worst case of a turn's memory depends.

    `max_step_tokens` is the most tokens one step computes for one turn. With `overlap`, a step may be planned before
    the outcome of the previous one is known, so the state before the step has to outlive it. `lookahead`: the most
    guesses of a turn in a step.
    """

    context_length: int
    max_running: int
    max_step_tokens: int
    overlap: bool
    lookahead: int
    checkpoint_interval: int
    checkpoint_share: float

    @property
    def most_kept(self) -> int:
        """The most tokens of a row whose inputs an executor keeps; see `plan.StateMoves`."""
        return self.lookahead + 1 if self.lookahead else 0

    @staticmethod
    def of(config: EngineConfig, page_size: int) -> Shape:
        """Returns the shape for this configuration; checkpoints are spaced by whole pages."""
        return Shape(
            context_length=config.context_length,
            max_running=config.max_running,
            max_step_tokens=config.token_budget,
            overlap=config.overlap > 0,
            lookahead=config.lookahead,
            checkpoint_interval=-(-config.checkpoint_interval // page_size) * page_size,
            checkpoint_share=config.checkpoint_share,
        )
