"""A Ray cluster of this machine with the fleet of the example in docs/ray.md: `python -m tests.ray.driver PORT FOLDER
DATABASE`. Each line of input is a JSON array of the application's name and two objects: options of its deployment, and
of its servers. A line of output follows once the fleet runs with them. The cluster ends with the input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve

from tenuto.ray.application import Arguments, fleet
from tests.docs.pages import ROOT, blocks

ADDRESS = "127.0.0.2"
"""Of the node: Ray replaces 127.0.0.1 by an address that others can reach."""
CHANGES = {
    '"smollm2"': '"witness:0.005", "context_length": 8192, "drain_seconds": 1.0',
    '"num_cpus": 2': '"num_cpus": 0.1',
}


def example(database: str) -> Arguments:
    """Runs the example, with a small model and on this database. Returns its arguments."""
    (block,) = (each for each in blocks("python") if each.page == "docs/ray.md")
    code = block.text
    for old, new in {**CHANGES, '"postgresql:///fleet"': repr(database)}.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(ROOT / "docs" / "ray.md"), "exec", dont_inherit=True), namespace)
    arguments: Arguments = namespace["arguments"]
    return arguments


def main() -> None:
    port, scratch, database = sys.argv[1:]
    ray.init(
        _node_ip_address=ADDRESS,
        _temp_dir=str(Path(scratch)),
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=8,
        object_store_memory=80 * 2**20,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        arguments, name = example(database), "fleet"
        print("running", flush=True)
        for line in sys.stdin:
            wanted, options, server = json.loads(line)
            if wanted != name:
                serve.delete(name)
            name = wanted
            changed = arguments.model_copy(
                update={
                    "deployment": {**arguments.deployment, **options},
                    "server": {**arguments.server, **server},
                }
            )
            serve.run(fleet(changed), name=name, route_prefix="/")
            print("running", flush=True)
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
