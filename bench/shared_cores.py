"""`python -m bench.shared_cores [PROCESSES]`: decode steps of the default model beside that many processes that keep
cores busy, 2 unless said otherwise.

The kernels run one thread a core. If the system gives each thread the same share of the cores, steps take as many times
longer as there are more threads than cores. Steps alone and beside others alternate in blocks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.kernels import Steps, executor_of
from bench.spread import Spread
from tenuto.exec.device import usable_cores

ROWS = (1, 16)
CONTEXT, ROUNDS, STEPS = 512, 5, 40


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps so many processes busy."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def main() -> None:
    """Prints the figures."""
    processes, cores = int(sys.argv[1]) if len(sys.argv) > 1 else 2, usable_cores()
    with executor_of("auto") as executor:
        steps = Steps(executor, rows=max(ROWS), context=CONTEXT + 1)
        for rows in ROWS:
            steps.fill(rows, CONTEXT)
            alone, beside = list[float](), list[float]()
            for _ in range(ROUNDS):
                alone += [steps.run(rows, CONTEXT, 1) for _ in range(STEPS)]
                with busy(processes):
                    beside += [steps.run(rows, CONTEXT, 1) for _ in range(STEPS)]
            ratio = sum(beside) / sum(alone)
            print(
                f"{rows:2} rows  alone {Spread.of_median(alone).scaled(1e3).shown()} ms, beside {processes} busy "
                f"processes {Spread.of_median(beside).scaled(1e3).shown()} ms; in the mean {ratio:.2f} times, where a "
                f"fair share is {(cores + processes) / cores:.2f}"
            )


if __name__ == "__main__":
    main()
