"""A program for an environment with a wheel of Tenuto and without a compiler: the default model answers by the
package's own kernels. `cibuildwheel` runs it for each wheel.

It prints the variant, and then the answer.
"""

import os
import sys
import tempfile
from pathlib import Path

import tenuto
from tenuto.base.config import cache_dir
from tenuto.kernels.native.build import PREBUILT, Machine
from tenuto.models.store import default_path, pull_default


def main() -> None:
    """Answers a question with the best variant that this CPU can run and the package has."""
    os.environ["PATH"] = "/nowhere"
    machine, shipped = Machine.this(), {path.name.partition("-")[0] for path in PREBUILT.glob("*.so")}
    if machine.compiler is not None:
        sys.exit(f"there is a compiler: {machine.compiler}")
    variant = next((name for name in machine.variants() if name in shipped), None)
    if variant is None:
        sys.exit(f"the package has kernels {sorted(shipped)}; this CPU can run {machine.variants()}")
    with tempfile.TemporaryDirectory() as cache:  # without kernels that were compiled earlier
        place = default_path(Path(cache))
        place.parent.mkdir()
        place.symlink_to(pull_default(cache_dir()))
        os.environ["TENUTO_CACHE"] = cache
        with tenuto.Engine("smollm2", context_length=512, kernels=variant) as engine:
            question = "What is the capital of France? Answer with one word."
            print(variant, "".join(engine.session().chat(question, max_new_tokens=16)))


if __name__ == "__main__":
    main()
