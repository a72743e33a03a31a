"""`python -m bench.adapters`: decode steps of the default model in which 16 rows have no, one, 4 or 16 adapters.

The adapters are random, of rank 16, and change all seven projections of every layer. The variants alternate, so that
all meet the same load. Figures are medians, with the fastest and the slowest in brackets.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

import numpy as np

from bench.kernels import Steps, executor_of
from tenuto.exec.model_executor import ModelExecutor, ReadAdapter
from tenuto.models.adapter import Adapter, LowRank, projections
from tenuto.models.weights import bfloat16_bits

ROWS, CONTEXT, RANK = 16, 512, 16
COUNTS = (0, 1, 4, 16)
"""Numbers of different adapters in a step."""


def random_adapters(executor: ModelExecutor, count: int, *, narrow: bool) -> Iterator[ReadAdapter]:
    """Yields adapters for the executor's model; `narrow`: their weights are bfloat16."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.01)
        return (bfloat16_bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32) if narrow else values

    for number in range(count):
        changes = {
            name: LowRank(matrix(RANK, inputs), matrix(outputs, RANK), 2.0)
            for name, (outputs, inputs) in projections(executor.forward.config).items()
        }
        yield ReadAdapter(str(number), executor.forward.packer(Adapter(changes, str(number))))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--steps", type=int, default=60, help="how many of each kind (default 60)")
    arguments = parser.parse_args()
    with executor_of(arguments.kernels) as executor:
        print(executor.forward.description)
        steps = Steps(executor, ROWS, CONTEXT + 32)
        steps.fill(ROWS, CONTEXT)
        for narrow in (True, False):
            for slot, adapter in enumerate(random_adapters(executor, max(COUNTS), narrow=narrow), 1):
                if not narrow:
                    executor.set_adapter(slot, None)
                executor.set_adapter(slot, adapter)
            taken: dict[int, list[float]] = {count: [] for count in COUNTS}
            for _ in range(arguments.steps):
                for count, seconds in taken.items():
                    slots = (np.arange(ROWS) % count + 1).astype(np.int32) if count else None
                    seconds.append(1000 * steps.run(ROWS, CONTEXT, 1, slots))
            for count, found in taken.items():
                kind = f"{'bfloat16' if narrow else 'float32'}, {count:2} adapters"
                print(f"{kind}: {median(found):6.1f} ms ({min(found):.1f} to {max(found):.1f})")


if __name__ == "__main__":
    main()
