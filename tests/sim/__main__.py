"""`python -m tests.sim --seeds N`: long runs of the simulator; `--seed N` replays one world with its traceback."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.run import (
    ADAPTED,
    ERASING,
    EXPECTING,
    GRAMMARS,
    LIMITED,
    OVERTAKING,
    PINNED,
    PREFIXED,
    REPLACING,
    TRAINED,
    any_world,
    run_world,
    run_worlds,
)
from tests.sim.setting import large_world


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=400, help="how many worlds (default 400)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one seed only")
    parser.add_argument(
        "--steps", type=int, default=500, help="engine steps a world, before it is wound up (default 500)"
    )
    parser.add_argument("--large", action="store_true", help="large worlds, recounted every 100 steps")
    parser.add_argument("--prefixes", action="store_true", help="small worlds with a prefix cache")
    parser.add_argument("--grammars", action="store_true", help="small worlds whose turns have grammars")
    parser.add_argument(
        "--overtaking", action="store_true", help="small worlds whose sessions start from memory of running turns"
    )
    parser.add_argument("--pinned", action="store_true", help="small worlds in which some sessions are pinned")
    parser.add_argument("--adapters", action="store_true", help="small worlds in which most sessions have adapters")
    parser.add_argument("--limits", action="store_true", help="small worlds in which many turns limit or name tokens")
    parser.add_argument("--erasing", action="store_true", help="small worlds in which sessions are erased")
    parser.add_argument("--replacing", action="store_true", help="small worlds whose sessions take over others")
    parser.add_argument("--expecting", action="store_true", help="small worlds whose sessions' next turns are expected")
    parser.add_argument("--trained", action="store_true", help="small worlds whose weights are replaced")
    parser.add_argument("--least", type=int, default=0, help="fail if a transition was seen fewer times than this")
    parser.add_argument("--past", nargs="*", default=(), help="rules to ignore, to see what else is found")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.seed is not None:
        config = large_world(arguments.seed) if arguments.large else any_world(arguments.seed)
        print(config)
        summary = run_world(config, arguments.steps, arguments.past)
    else:
        ranges = (
            (arguments.grammars, GRAMMARS),
            (arguments.prefixes, PREFIXED),
            (arguments.overtaking, OVERTAKING),
            (arguments.pinned, PINNED),
            (arguments.adapters, ADAPTED),
            (arguments.limits, LIMITED),
            (arguments.erasing, ERASING),
            (arguments.replacing, REPLACING),
            (arguments.expecting, EXPECTING),
            (arguments.trained, TRAINED),
        )
        first = arguments.first + sum(start for wanted, start in ranges if wanted)
        seeds = range(first, first + arguments.seeds)
        summary = run_worlds(seeds, arguments.steps, large=arguments.large, ignored=arguments.past)
        print(summary.table())
    for seed, report in summary.failures.items():
        print(f"\nseed {seed} failed; replay: python -m tests.sim --seed {seed} --steps {arguments.steps}\n{report}")
    seconds = time.monotonic() - began
    print(f"{summary.steps:,} steps in {seconds:.0f} s, {len(summary.failures)} failing worlds")
    if arguments.seed is None:
        count, name, cell = summary.rarest()
        print(f"rarest transition: {name} under {' '.join(cell)}, {count:,} times")
        if count < arguments.least:
            return 1
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
