"""`python -m bench.peers` (`make bench-peers`): compares Tenuto with the best other servers.

The scripts in `bench/install` install the peers outside Tenuto's own environment; missing peers are left out and listed
as such. A run needs a quiet machine: two busy processes slow down engines with busy-waiting threads extremely.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path

from bench.peers.catalog import PEERS, Peer, Setting
from bench.peers.limits import limits
from bench.peers.picture import draw
from bench.peers.report import Results, document, machine
from bench.peers.rounds import Rounds
from bench.peers.workload import SHAPES, Shape, word_tokens
from tenuto.kernels.native.build import Machine


def parse(given: list[str]) -> argparse.Namespace:
    """Parses the command line. Exits with a message if it is invalid."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    usual = tuple(peer for peer in PEERS if not peer.asked)
    names = f"some of {','.join(peer.name for peer in PEERS)}; default: {','.join(peer.name for peer in usual)}"
    parser.add_argument("--peers", type=_peers, default=usual, help=names)
    parser.add_argument("--shapes", type=_shapes, default=SHAPES, help="SESSIONSxTURNS, separated by commas")
    parser.add_argument("--rounds", type=_at_least_one, default=3, help="number of rounds")
    parser.add_argument("--no-limits", action="store_true", help="do not measure the engines' steps by themselves")
    parser.add_argument("--out", type=Path, help="the document to write, with its picture beside it; default: stdout")
    return parser.parse_args(given)


def _peers(text: str) -> tuple[Peer, ...]:
    known = {peer.name: peer for peer in PEERS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def _shapes(text: str) -> tuple[Shape, ...]:
    try:
        return tuple(map(Shape.parse, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; allowed: SESSIONSxTURNS, such as 4x20") from None


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; allowed: at least 1")
    return int(text)


def run(chosen: argparse.Namespace, command: str) -> Results:
    """Measures the chosen peers and shapes."""
    setting = Setting.of_this_machine()
    this = Machine.this()
    absences = {peer: peer.absence(setting, this) for peer in chosen.peers}
    peers = tuple(peer for peer, reason in absences.items() if not reason)
    absent = tuple(filter(None, absences.values()))
    for reason in absent:
        print(reason, file=sys.stderr)
    rounds = Rounds(setting, word_tokens(), lambda line: print(line, file=sys.stderr, flush=True))
    return Results(
        machine=machine(setting.threads),
        command=command,
        rounds=chosen.rounds,
        peers=peers,
        shapes=chosen.shapes,
        limits=None if chosen.no_limits else limits(setting),
        samples=tuple(rounds.run(peers, chosen.shapes, chosen.rounds)),
        versions={peer.name: version for peer in peers if (version := peer.version(setting)) is not None},
        absent=absent,
    )


def main() -> None:
    """Measures, then writes the document and its picture, or prints the document."""
    chosen = parse(sys.argv[1:])
    if chosen.out is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--out needs matplotlib for its picture: pip install 'tenuto[bench]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises SystemExit, so that peers are ended
    results = run(chosen, " ".join(["python -m bench.peers", *sys.argv[1:]]))
    picture = (chosen.out or Path("benchmarks")).with_suffix(".svg")
    text = document(results, picture.name)
    if chosen.out is None:
        print(text)
    else:
        chosen.out.write_text(text)
        draw(results, picture)


if __name__ == "__main__":
    main()
