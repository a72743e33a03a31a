"""The command line of simulations of which each seed is a world."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable


def run(description: str | None, simulate: Callable[[int, int], int], steps: int, logger: str) -> None:
    """Runs worlds as the command line asks. `simulate`: runs the world of a seed for a number of steps, by default
    `steps`, and returns its operations. `logger`: shows only critical records meanwhile. Raises what
    `simulate` does."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int, default=steps)
    given = parser.parse_args()
    logging.getLogger(logger).setLevel(logging.CRITICAL)
    seeds = range(given.seeds) if given.seed is None else [given.seed]
    operations = 0
    for seed in seeds:
        try:
            operations += simulate(seed, given.steps)
        except BaseException:
            print(f"seed {seed} fails")
            raise
    print(f"{len(seeds)} worlds, {operations} operations")
