"""The process of a replica's server: `python -m tenuto.ray.server`. The first line of its input is a JSON object with
options. It ends in order when its input ends, as happens whenever the process that started it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TextIO

import typer

from tenuto.base.errors import TenutoError
from tenuto.cli.serve import run_server
from tenuto.cli.settings import ServerSettings


def main() -> None:
    """Serves until its input ends. An error is one line on stderr and a non-zero exit status."""
    try:
        settings = ServerSettings.resolve({}, None, json.loads(sys.stdin.readline()))
        threading.Thread(target=end_after, args=(sys.stdin,), name="tenuto-lifeline", daemon=True).start()
        run_server(settings)
    except TenutoError as error:
        typer.echo(f"tenuto: {error}", err=True)
        sys.exit(1)
    except typer.Exit as error:
        sys.exit(error.exit_code)


def end_after(given: TextIO) -> None:
    """Waits for the end of the input, and then ends this process in order."""
    while given.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
