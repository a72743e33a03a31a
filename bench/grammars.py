"""`python -m bench.grammars [MODEL]`: steps of 16 turns that write JSON by a schema, compared with 16 free turns.

One engine runs both alternately. A figure is the median over all steps in which 16 turns decode, with the fastest and
the slowest round's median in brackets. Masks are computed while the step runs, so their cost is the time they take
beyond it, and the cores' time meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time

from bench.spread import Spread
from tenuto.base.config import EngineConfig, WorkerSettings
from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import Sampling
from tenuto.base.tools.grammar import Grammar
from tenuto.engine.engine import Engine
from tenuto.runtime.models import Model, build_engine, load_model
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.masks import MaskThreads

STREAMS = 16
TOKENS = 96
ROUNDS = 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["engineer", "artist", "teacher", "farmer"]},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "role", "notes"],
    "additionalProperties": False,
}
SCHEMA = Grammar.of_schema({"type": "array", "items": PERSON, "minItems": 50})
KINDS: dict[str, Sampling] = {"greedy": Sampling(), "temperature 0.8": Sampling(temperature=0.8)}


def decode_seconds(
    engine: Engine, model: Model, compiler: GrammarCompiler, grammar: Grammar | None, sampling: Sampling
) -> float:
    """Returns the median seconds of a step in which all streams decode."""
    assert model.tokenizer is not None
    turns = []
    for n in range(STREAMS):
        session = engine.sessions.open(policy=Policy(ephemeral=True))
        prompt = model.tokenizer.encode(f"Here is a list of people, number {n}, as JSON:\n")
        params = TurnParams(max_new_tokens=TOKENS, sampling=sampling, grammar=grammar, ignore_eos=True)
        constraint = compiler.constraint(grammar) if grammar is not None else None
        turns.append(engine.turns.submit(session.id, prompt, params, None, constraint))
    seconds = []
    while not all(turn.state.ended for turn in turns):
        decoding = all(turn.output and not turn.state.ended for turn in turns)
        began = time.perf_counter()
        engine.step()
        if decoding:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    """Prints the figures."""
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    model, masks = load_model(WorkerSettings(model=name, page_size=16)), MaskThreads()
    compiler = model.grammars()
    assert compiler is not None
    print(f"{name}: {model.compute}; {STREAMS} streams of {TOKENS} tokens, milliseconds a step")
    for overlap in (0, 1):
        config = EngineConfig(context_length=256, max_running=STREAMS, overlap=overlap, token_budget=512)
        engine = build_engine(model, config, 2**29, masks)
        for kind, sampling in KINDS.items():
            rounds = [
                [1000 * decode_seconds(engine, model, compiler, grammar, sampling) for grammar in (None, SCHEMA)]
                for _ in range(ROUNDS)
            ]
            free, bound = ([each[column] for each in rounds] for column in (0, 1))
            ratio = statistics.median(b / a for a, b in rounds)
            shown = f"free {Spread.of(free).shown()}, with a schema {Spread.of(bound).shown()}"
            print(f"  overlap {overlap}, {kind}: {shown}, ratio {ratio:.2f}")
    model.executor.close()
    masks.close()


if __name__ == "__main__":
    main()
