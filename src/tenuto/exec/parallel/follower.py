"""The process of a rank after the first one: it carries out what comes on its standard input, and ends with that, or
with an error."""

from __future__ import annotations

import os
import pickle
import signal
import sys

from tenuto.base.errors import ConfigError, ModelError
from tenuto.exec.parallel.followers import Refused, Start
from tenuto.exec.parallel.ranks import GroupRanks
from tenuto.models.shards import shard_adapter

ANSWERED = ("prepare", "read_units")
"""The methods whose result the first rank waits for."""


def main() -> None:
    """Runs the process. Other output goes to standard error, so that it does not mix with the answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(value: object) -> None:
        pickle.dump(value, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()

    start: Start = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    ranks = GroupRanks(start.rank, start.size, start.meeting, start.device)
    try:
        forward = start.build(ranks)
    except (ModelError, ConfigError, OSError) as error:
        answer(Refused(str(error)))
        return
    answer(None)
    while True:
        try:
            name, args = pickle.load(sys.stdin.buffer)  # noqa: S301 - see above
        except EOFError:
            return
        if name == "connect":
            ranks.connect()
            answer(None)
            continue
        if name == "set_adapter":
            slot, adapter = args
            args = slot, forward.packer(shard_adapter(adapter, start.rank, start.size)) if adapter else None
        try:
            result = getattr(forward, name)(*args)
        except ConfigError as error:
            result = Refused(str(error))
        if name in ANSWERED:
            answer(result)


if __name__ == "__main__":
    main()
