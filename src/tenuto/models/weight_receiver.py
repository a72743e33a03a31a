"""The process that is a member of one group of a trainer. It joins it and receives tensors as its standard input says,
and ends with that, also while it waits for others.

`torch.distributed` ends a process to which a trainer sends more than was announced, so this cannot be the engine's.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from datetime import timedelta
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from tenuto.models.weight_groups import UNSENT, Announced, Joining

WAIT = timedelta(seconds=300)
"""Time for the other processes of a group to join, or for the trainer to send a tensor."""
BACKEND = "gloo"
"""The only backend, because weights are received on the CPU."""


def main() -> None:
    """Runs the process. Each message is answered with a pickled text, which says what failed or is empty; then the
    bytes of a tensor follow. Other output goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    messages: SimpleQueue[Joining | Announced] = SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    group: Any = None
    while True:
        message, data, failed = messages.get(), memoryview(b""), ""
        try:
            if isinstance(message, Joining):
                group = _joined(message)
            else:
                data = _received(message, group)
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            failed = (str(error).splitlines() or [repr(error)])[0][:300]
        pickle.dump(failed, answers)
        answers.write(data)
        answers.flush()


def _read(messages: SimpleQueue[Joining | Announced]) -> None:
    try:
        while True:
            messages.put(pickle.load(sys.stdin.buffer))  # noqa: S301 - from the process that started this one
    except EOFError:
        os._exit(0)  # without waiting for the trainer


def _joined(message: Joining) -> Any:
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    name, rank, size = message.name, message.rank, message.size
    store, _, _ = next(c10d.rendezvous(f"tcp://{message.address}:{message.port}", rank, size, timeout=WAIT))
    store.set_timeout(WAIT)
    # As trainers make their side, beside the default group: this function is private, but the names that it gives keys
    # in the store are what both sides have to agree on.
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - see above
        size, rank, [], c10d.Backend(BACKEND), c10d.PrefixStore(name, store), group_name=name, timeout=WAIT
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}  # noqa: SLF001 - see above
    return group


def _received(message: Announced, group: Any) -> memoryview:
    import torch  # noqa: PLC0415 - loaded by now
    from torch import distributed  # noqa: PLC0415 - loaded by now

    tensor = torch.empty(tuple(message.shape), dtype=getattr(torch, message.dtype))
    data = tensor.reshape(-1).view(torch.uint8)
    data[-1:] = UNSENT
    distributed.broadcast(tensor, 0, group)
    return data.numpy().data


if __name__ == "__main__":
    main()
