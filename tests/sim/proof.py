"""Proves the simulator: with each planted fault, slip or removed call some world or story must fail.

`python -m tests.sim.proof` plants all of them and prints what caught each, after how many steps; `--write` saves that
to `catchers.json`, so that the tests find it at once; `--only REGEX` selects by name."""

from __future__ import annotations

import argparse
import json
import re
import sys

from tests.sim.everything import CATCHERS, everything, is_justified, known_catchers
from tests.sim.planted import Job, look_for_all

MAX_STEPS = 100_000
"""The number of steps within which every planted change must be caught."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.proof", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--unknown", action="store_true", help="only changes without a known catcher")
    parser.add_argument("--anew", action="store_true", help="forget the known seeds")
    parser.add_argument("--steps", type=int, default=MAX_STEPS)
    parser.add_argument("--past", nargs="*", default=(), help="rules to ignore")
    arguments = parser.parse_args()
    every, known = everything(), known_catchers()
    chosen = [name for name in every if re.search(arguments.only, name) and not is_justified(name)]
    if arguments.unknown:
        chosen = [name for name in chosen if name not in known]
    first = {name: catcher for name, catcher in known.items() if not arguments.anew or isinstance(catcher, str)}
    jobs = [Job(every[name], arguments.steps, first.get(name), arguments.past, name) for name in chosen]
    survivors, seconds = 0, 0.0
    for name, outcome in zip(chosen, look_for_all(jobs), strict=True):
        print(f"{outcome}  {name}", flush=True)
        seconds += outcome.seconds
        if outcome.catcher is None:
            survivors += 1
        elif arguments.write:
            known = {each: catcher for each, catcher in known.items() if each in every} | {name: outcome.catcher}
            CATCHERS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    print(f"{len(chosen) - survivors} of {len(chosen)} were caught, in {seconds:.0f} seconds of processor time")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
