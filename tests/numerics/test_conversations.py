"""Random conversations on the default model in float32: every token a session samples equals the one sampled from
scratch.

Several sessions at once take short turns, drafts, aborts, barge-ins, forks, rewinds and regenerations, in a pool that
does not hold them all, while turns are preempted at random and everything is recounted after every operation. The
comparison from scratch is one forward pass of transformers over each sequence of tokens that any turn has seen,
including aborted ones: at every sampled position, its most likely token must be the one we sampled.

Tolerance: another token is allowed if its logit is less than 2e-3 below the highest; `test_logits` measures differences
of up to 6e-4 in each of two logits. The number of such tokens is reported.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from transformers import LlamaForCausalLM

from tenuto.base.config import EngineConfig
from tenuto.base.options import TurnParams
from tenuto.base.turns import Keep, TurnState
from tenuto.engine.engine import Engine
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.numerics.real import real_engine

CLOSE = 2e-3
CONTEXT, PAGE, PAGES, SESSIONS = 112, 4, 90, 16
STEPS = 34

Tokens = tuple[int, ...]

KEPT: tuple[Keep, ...] = (0, 3, "delivered")


class Conversations:
    """Drives one engine at random and records all tokens that turns have seen and sampled.

    `sampled[tokens]` are the positions in the sequence `tokens` whose tokens a turn has sampled.
    """

    def __init__(self, engine: Engine, text: list[int], seed: int) -> None:
        self.engine = engine
        self.text = text
        self.rng = Random(seed)
        self.sampled: dict[Tokens, set[int]] = {}
        self._seen: set[int] = set()  # numbers of turns that are in `sampled`
        self._operations: list[tuple[Callable[[], None], int]] = [
            (self._open, 8),
            (self._submit, 50),
            (self._draft, 26),
            (self._regenerate, 8),
            (self._abort, 9),
            (self._barge_in, 5),
            (self._fork, 16),
            (self._rewind, 6),
            (self._close, 4),
            (self._preempt, 4),
        ]

    def run(self, steps: int) -> None:
        operations, weights = zip(*self._operations, strict=True)
        for _ in range(steps):
            for operation in self.rng.choices(operations, weights, k=self.rng.choice((2, 4, 6))):
                operation()
                self.engine.audit()
            self._step()
        for session in self._sessions(lambda s: s.turn is not None and s.turn.state is TurnState.DRAFTING):
            self._abort_turn(session, None)
        while not self.engine.idle:
            self._step()

    def _step(self) -> None:
        for turn in self.engine.step().ended:
            self._take_in(turn)

    def _take_in(self, turn: Turn) -> None:
        if turn.number in self._seen:
            return
        self._seen.add(turn.number)
        tokens = tuple(turn.tokens(0, turn.length))
        self.sampled.setdefault(tokens, set()).update(range(turn.prompt_length, turn.length))
        if turn.result is not None and turn.result.committed:
            assert tuple(turn.session.history) == tokens[: turn.prompt_length + turn.result.kept]

    # -- operations

    def _sessions(self, wanted: Callable[[Session], bool]) -> list[Session]:
        return [session for session in self.engine.registry if wanted(session)]

    def _pick(self, wanted: Callable[[Session], bool]) -> Session | None:
        found = self._sessions(wanted)
        return self.rng.choice(found) if found else None

    def _idle(self, least: int = 0) -> Session | None:
        return self._pick(lambda s: s.turn is None and len(s.history) >= least)

    def _some_text(self, room: int) -> list[int]:
        length = min(room, self.rng.choice((1, 1, 2, 4, 7, 12, 20)))
        start = self.rng.choice((0, 0, self.rng.randrange(len(self.text) - 20)))
        return self.text[start : start + length]

    def _params(self) -> TurnParams:
        stops = tuple(self.rng.sample(self.text, 40)) if self.rng.random() < 0.2 else ()
        return TurnParams(
            max_new_tokens=self.rng.choice((1, 4, 8, 12, 24)), stop_ids=stops, ignore_eos=self.rng.random() < 0.5
        )

    def _open(self) -> None:
        if len(self._sessions(lambda _: True)) < SESSIONS:
            self.engine.sessions.open()

    def _submit(self) -> None:
        """Submits a turn in an idle session, or a draft, perhaps with more tokens."""
        session = self._pick(lambda s: s.turn is None or s.turn.state is TurnState.DRAFTING)
        if session is None:
            return
        tokens = list(session.turn.input) if session.turn is not None else []
        tokens += self._some_text(session.context_left - len(tokens) - 1)
        if session.context_left - len(tokens) < 1 or not (session.history or tokens):
            self.engine.sessions.rewind(session.id, turn=0) if session.turn is None else self._abort_turn(session, None)
            return
        self.engine.turns.submit(session.id, tokens, self._params())

    def _draft(self) -> None:
        """Opens a draft, or changes the end of one."""
        drafting = self._pick(lambda s: s.turn is not None and s.turn.state is TurnState.DRAFTING)
        session = self._idle() if drafting is None or self.rng.random() < 0.5 else drafting
        if session is None:
            return
        kept = list(session.turn.input) if session.turn is not None else []
        kept = kept[: self.rng.randint(0, len(kept))]
        self.engine.turns.draft(session.id, kept + self._some_text(max(0, session.context_left - len(kept) - 1)))

    def _regenerate(self) -> None:
        session = self._pick(
            lambda s: s.turn is None and bool(s.records) and s.records[-1].end > s.records[-1].input_end
        )
        if session is not None:
            self.engine.turns.regenerate(session.id, self._params())

    def _abort(self) -> None:
        session = self._pick(lambda s: s.turn is not None)
        if session is not None:
            self._abort_turn(session, None)

    def _barge_in(self) -> None:
        session = self._pick(lambda s: s.has_running_turn)
        if session is not None:
            self._abort_turn(session, self.rng.choice(KEPT))

    def _abort_turn(self, session: Session, keep: Keep) -> None:
        self._take_in(self.engine.turns.abort(session.id, keep))

    def _fork(self) -> None:
        session = self._pick(lambda s: len(s.history) > 0)
        if session is not None and len(self._sessions(lambda _: True)) < SESSIONS:
            length = len(session.history)
            self.engine.sessions.fork(session.id, position=self.rng.choice((length, self.rng.randint(1, length))))

    def _rewind(self) -> None:
        session = self._idle(least=1)
        if session is not None:
            self.engine.sessions.rewind(session.id, position=self.rng.randint(0, len(session.history)))

    def _close(self) -> None:
        session = self._idle()
        if session is not None:
            self.engine.sessions.close(session.id)

    def _preempt(self) -> None:
        session = self._pick(lambda s: s.has_running_turn)
        if session is not None and session.turn is not None:
            self.engine.pressure.preempt(session.turn)


@dataclass
class Comparison:
    """Compares sampled tokens with the most likely ones from scratch."""

    compared: int = 0
    closest: float = float("inf")  # least gap between the two highest logits
    behind: list[float] = field(default_factory=list)  # gaps to the highest logit where we sampled another token

    def add(self, logits: torch.Tensor, tokens: Tokens, positions: list[int]) -> None:
        """Adds `logits`, float32 [positions, vocab], from which the tokens of `tokens` at `positions` should have been
        sampled."""
        ours = logits.gather(1, torch.tensor([[tokens[p]] for p in positions]))[:, 0]
        best, second = logits.topk(2).values.T
        self.compared += len(positions)
        self.closest = min(self.closest, (best - second).min().item())
        self.behind += (best - ours)[ours < best].tolist()

    def __str__(self) -> str:
        worst = f", by at most {max(self.behind):.1e}" if self.behind else ""
        return (
            f"{len(self.behind)} of {self.compared} tokens differ from scratch{worst}; "
            f"the two highest logits are never closer than {self.closest:.1e}"
        )


def longest(sampled: dict[Tokens, set[int]]) -> Iterator[tuple[Tokens, list[int]]]:
    """Returns the sequences that are not prefixes of others, with the sampled positions of all their prefixes."""
    ordered = sorted(sampled)
    positions: set[int] = set()
    for i, tokens in enumerate(ordered):
        positions = positions | sampled[tokens]
        if i + 1 == len(ordered) or ordered[i + 1][: len(tokens)] != tokens:
            if positions:
                yield tokens, sorted(positions)
            positions = set()


@torch.inference_mode()
def compare(reference: LlamaForCausalLM, sequences: Iterable[tuple[Tokens, list[int]]], width: int = 8) -> Comparison:
    comparison = Comparison()
    ordered = sorted(sequences, key=lambda item: len(item[0]))
    for first in range(0, len(ordered), width):
        batch = ordered[first : first + width]
        most = len(batch[-1][0])
        # padding after the end is not seen
        padded = torch.tensor([tokens + (0,) * (most - len(tokens)) for tokens, _ in batch])
        hidden = reference.model(padded, use_cache=False).last_hidden_state
        for row, (tokens, positions) in zip(hidden, batch, strict=True):
            comparison.add(reference.lm_head(row[torch.tensor(positions) - 1]), tokens, positions)
    return comparison


CONFIG = EngineConfig(
    context_length=CONTEXT, max_running=12, max_sessions=SESSIONS, token_budget=48, overlap=1, audit_every=1
)


def test_every_turn_of_random_conversations_samples_what_is_sampled_from_scratch(
    model: Decoder, reference: LlamaForCausalLM, licence_tokens: list[int]
) -> None:
    """Steps overlap, as on servers; `test_hybrid_conversations` also runs PyTorch without overlap."""
    with real_engine(TorchForward(model, PAGE), CONFIG, units=(PAGES,)) as engine:
        conversations = Conversations(engine, licence_tokens, seed=5)
        conversations.run(STEPS)
    comparison = compare(reference, longest(conversations.sampled))
    print(comparison, dict(conversations.engine.transitions), sep="\n")
    assert all(behind < CLOSE for behind in comparison.behind), str(comparison)
    assert_covered(conversations)


def assert_covered(conversations: Conversations) -> None:
    """Checks that everything in the module's docstring has happened often enough."""
    seen = Counter({str(each): count for each, count in conversations.engine.transitions.items()})
    wanted = ["commit", "abort running", "barge-in running", "fork", "rewind", "regenerate", "draft", "submit draft"]
    wanted += ["preempt", "drop idle"]
    assert not [name for name in wanted if not seen[name]], f"too few events: {seen}"
