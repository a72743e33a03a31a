"""Measures the savings of a compaction: `python -m bench.compaction [MODEL]`.

A session of twelve turns has its turns 2 to 10 replaced by a given summary. Then it takes a turn. Beside it, in the
same run, the compacted history and the same question are sent as one request, without a session and without shared
prefixes, as a client has to that compacts by itself. Prints the tokens computed and the time to the first token.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import tenuto
from tenuto.base.compaction import ASKED

TURNS = 12
FIRST, LAST = 2, 10
WORDS = 160
ROUNDS = 5
SUMMARY = "They talked about rivers, lakes and the towns beside them, and want to travel by train. " * 4
QUESTION = {"role": "user", "content": "Where shall we go first?"}
SYSTEM = "You are a guide who knows every river of the country. " * 8


def told(number: int) -> dict[str, str]:
    """Returns a long message of the user."""
    return {"role": "user", "content": f"About place {number}: " + "water and stone by the road, " * (WORDS // 6)}


def fill(engine: tenuto.Engine) -> tuple[tenuto.Session, list[dict[str, Any]]]:
    """Returns a session of many turns, and its messages."""
    session, messages = engine.session(system=SYSTEM), [{"role": "system", "content": SYSTEM}]
    for number in range(TURNS):
        turn = session.turn([told(number)], max_new_tokens=16, ignore_eos=True)
        messages += [told(number), {"role": "assistant", "content": "".join(turn)}]
    return session, messages


def first_token(turn: tenuto.TurnStream) -> tuple[float, int]:
    """Returns the time to the turn's first token, in seconds, and the number of tokens computed."""
    result = turn.result()
    assert turn.time_to_first_token is not None
    return turn.time_to_first_token, result.usage.computed


def main() -> None:
    """Prints the figures."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    rows: dict[str, list[tuple[float, int]]] = {"after the compaction": [], "sent again": [], "the compaction": []}
    with tenuto.Engine(model, context_length=4096, prefix_cache=False) as engine:
        for _ in range(ROUNDS):
            session, messages = fill(engine)
            whole = session.info.tokens
            began = time.perf_counter()
            done = session.compact(FIRST, LAST, summary=SUMMARY)
            rows["the compaction"].append((time.perf_counter() - began, done.computed))
            asked = {"role": "user", "content": ASKED}
            said = {"role": "assistant", "content": SUMMARY}
            compacted = [*messages[: 2 * FIRST - 1], asked, said, *messages[2 * LAST + 1 :]]
            rows["sent again"].append(first_token(engine.generate([*compacted, QUESTION], max_new_tokens=1)))
            rows["after the compaction"].append(first_token(session.turn([QUESTION], max_new_tokens=1)))
            session.close()
    print(f"{model}: {whole} tokens before, {done.info.tokens} after")
    for name, figures in rows.items():
        seconds, tokens = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"  {name:21} {1000 * seconds:7.1f} ms, {tokens:.0f} tokens computed")
    again, after = (
        statistics.median(seconds for seconds, _ in rows[name]) for name in ("sent again", "after the compaction")
    )
    ratio = again / after
    print(f"  the turn after the compaction has its first token {ratio:.1f} times sooner than one sent again")


if __name__ == "__main__":
    main()
