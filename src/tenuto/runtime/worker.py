"""The engine process: `python -m tenuto.runtime.worker FD` answers messages on the socket it inherits as FD.

The first message is `WorkerSettings`; the answer is a `ModelView`, or a refusal. The process ends when the other side
closes the socket, for whatever reason. Open turns are then aborted, and nothing is left running.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from tenuto.base.config import WorkerSettings
from tenuto.base.errors import TenutoError
from tenuto.base.heap import HeapKeeper, share_one_arena
from tenuto.base.interpreter import configure_interpreter, exempt_existing_objects
from tenuto.base.logs import configure_logs
from tenuto.base.wire.frames import LARGE, FrameReader, frame
from tenuto.base.wire.messages import AnyRequest, Describe
from tenuto.base.wire.pieces import in_pieces
from tenuto.base.wire.replies import Answer, AnyReply, refusal_of
from tenuto.runtime.opening import open_service
from tenuto.runtime.service import Service

log = logging.getLogger("tenuto.engine")

_decoder = msgspec.msgpack.Decoder(AnyRequest)


class Sender:
    """Sends messages while the other side is connected. The caller waits for the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, message: AnyReply) -> None:
        with suppress(OSError):  # the other side is gone; `run` notices it, too
            for piece in frame(*self._encoded(message)):
                self._connection.sendall(piece)

    def _encoded(self, message: AnyReply) -> Sequence[bytes | memoryview]:
        if isinstance(message, Answer) and len(memoryview(message.value)) >= LARGE:
            return in_pieces(message, self._encoder)
        return (self._encoder.encode(message),)


def run(connection: socket.socket) -> None:
    """Serves until the other side closes the connection."""
    send, frames = Sender(connection), FrameReader()
    service: Service | None = None
    try:
        while received := connection.recv_into(frames.room()):
            service = _obey(frames.took(received), service, send)
    except TenutoError as error:
        send(refusal_of(0, error))
    except ConnectionError:  # the other side is gone
        pass
    finally:
        if service is not None:
            service.close()


def _obey(payloads: Iterator[bytes | memoryview], service: Service | None, send: Sender) -> Service | None:
    """Handles received messages; the first opens the service, which is returned. The caller keeps no reference to a
    message, so that large ones are freed at once."""
    for payload in payloads:
        if service is None:
            settings = msgspec.msgpack.decode(payload, type=WorkerSettings)
            configure_logs(settings.log_level)
            service = open_service(settings, send)
            exempt_existing_objects(collect=settings.journal is None)  # otherwise done before it was read
            log.info("engine started", extra={"model": settings.model})
            service.handle(Describe(call=0))
        else:
            service.handle(_decoder.decode(payload))
    return service


def main() -> None:
    """Takes over the inherited socket. Ignores signals that are sent to all processes (an interrupt at the terminal, a
    service manager's SIGTERM): the parent handles them and closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_interpreter()
    share_one_arena()
    HeapKeeper().start()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        run(connection)


if __name__ == "__main__":
    main()
