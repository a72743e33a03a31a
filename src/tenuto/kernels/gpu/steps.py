"""The two ends of a captured step on a CUDA device, which reads its numbers from host memory and writes its tokens
there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import cdiv

from tenuto.base.sampling import MAX_LOGPROBS
from tenuto.kernels.gpu import steps_kernels as kernels
from tenuto.kernels.gpu.edits import SampledRows

_BLOCK = 128
"""The number of rows, of samples, or of changes of a page table, that a program reads."""
_SPREAD, _CHUNK = 32, 64
"""The number of tokens that a program reads, and of rows that it looks at at a time."""
_WORDS = 128
"""The number of words of a mask that a program reads."""

SPAN = 3
"""The first field of `Slots.spans`."""
ADAPTER = 8
"""The field of the slot of a row's adapter."""
OWN = 9
"""The fields that a step has for each row before those of states: position of the first token, number of samples, index
of the first one among the step's; then, as in `Slots.spans`, row id, index of the first token in the step, number of
tokens, number of inputs that the row absorbs, and whether it keeps those of its tokens; and `ADAPTER`."""
CHANGED = 3
"""The fields of changes of a page table: row id, index, page."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The numbers of several steps, in host memory that the device addresses, [entries, ...].

    `counts`, int32 [entries, 3 + page tables]: the numbers of rows, of tokens, of samples, and of changes of each
    table. `inputs`, int32 [entries, most tokens]: ids of tokens. `numbers`, int32 [entries, fields, most rows]: those
    of each row, `OWN` of them and the slots that each state group reads and writes. `changes`, int32 [entries, CHANGED
    of each table, most changes]. `options`, float64 [entries, most rows, fields]: records of
    `kernels.sampling.OPTIONS`. `masked`, int32 [entries, most samples]: the number of each sample's mask, or -1.
    `masks`, int32 [entries, most masks, words]: see `kernels.sampling.Masks`. The step writes `tokens`, int32 [entries,
    most samples], and perhaps log-probabilities, if there are no more samples than rows can be: `chosen`, float32
    [entries, most rows], those of the tokens, and `top_tokens`, int32, and `top`, float32, the likeliest tokens and
    theirs, both [entries, most rows, MAX_LOGPROBS]. On the device, int32 [1] each: `turn`, the entry of the next step,
    and `place`, that of the one that is computed.
    """

    counts: torch.Tensor
    inputs: torch.Tensor
    numbers: torch.Tensor
    changes: torch.Tensor
    options: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor
    tokens: torch.Tensor
    chosen: torch.Tensor
    top_tokens: torch.Tensor
    top: torch.Tensor
    turn: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, on the device. `numbers`, int32 [fields, rows]: see `Entries`; an entry without a row has
    slots of -1, a first token and a first sample behind all others, and zeros. `alone`, int32 [rows]: the position of
    its token if it computes one, or else -1."""

    numbers: torch.Tensor
    alone: torch.Tensor

    @property
    def spans(self) -> torch.Tensor:
        """See `Slots.spans`."""
        return self.numbers[SPAN:ADAPTER]

    @property
    def ids(self) -> torch.Tensor:
        """The row of the page tables of each."""
        return self.numbers[SPAN]

    @property
    def firsts(self) -> torch.Tensor:
        """The index of each row's first token."""
        return self.numbers[SPAN + 1]

    @property
    def moves(self) -> torch.Tensor:
        """The slots that each state group reads and writes, int32 [groups, 2, rows]."""
        return self.numbers[OWN:].view(-1, 2, self.numbers.shape[1])


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a step, on the device, int32 [tokens] each: ids, each one's row of the page tables, and its
    position, which is -1 where there is no token. `tiles`: see `attention.tiles_of`; int32 [most of them, 4], those of
    rows with several tokens, then some without tokens."""

    ids: torch.Tensor
    owners: torch.Tensor
    positions: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """The samples of a step, on the device, rows in order. `after`: the index of the token before each, or 0 without a
    sample. `owners`: the row id if it is the row's last sample, or else -1; both int32 [samples]. `choice`: the
    options, each [samples], in the order that `sample` takes them."""

    after: torch.Tensor
    owners: torch.Tensor
    choice: tuple[torch.Tensor, ...]


def begin(entries: Entries, fields: int, rows: int) -> Rows:
    """Reads the next step of at most `rows` rows. `fields`: the number of each row."""
    numbers = torch.empty((fields + 1, rows), device=entries.turn.device, dtype=torch.int32)
    kernels.begin[(cdiv(rows, _BLOCK),)](
        entries.turn,
        entries.place,
        entries.counts,
        entries.numbers,
        numbers,
        rows,
        entries.numbers.shape[2],
        entries.counts.shape[1],
        entries.numbers.shape[1],
        FIELDS=fields,
        OWN=OWN,
        BLOCK=_BLOCK,
    )
    return Rows(numbers[:fields], numbers[fields])


def select(entries: Entries, rows: Rows, samples: int) -> Sampling:
    """Finds the step's samples, at most `samples`. Random numbers are those of `kernels.sampling.uniforms`."""
    device = entries.turn.device
    found = torch.empty((2, samples), device=device, dtype=torch.int32)
    floats = torch.empty((4, samples), device=device, dtype=torch.float64)
    top_k = torch.empty(samples, device=device, dtype=torch.int32)
    kernels.select[(cdiv(samples, _BLOCK),)](
        entries.place,
        entries.counts,
        entries.options,
        entries.options.view(torch.int64),
        rows.numbers,
        found,
        floats,
        top_k,
        rows.numbers.shape[1],
        samples,
        entries.options.shape[1],
        entries.counts.shape[1],
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
    )
    temperature, top_p, min_p, uniform = floats
    return Sampling(found[0], found[1], (temperature, top_k, top_p, min_p, uniform))


def trace(entries: Entries, rows: Rows, samples: int) -> SampledRows:
    """Finds whose the step's samples are, at most `samples`, and the guesses before them."""
    found = torch.empty((3, samples), device=entries.turn.device, dtype=torch.int32)
    kernels.trace[(cdiv(samples, _BLOCK),)](
        entries.place,
        entries.counts,
        entries.inputs,
        rows.numbers,
        found,
        rows.numbers.shape[1],
        samples,
        entries.inputs.shape[1],
        entries.counts.shape[1],
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
    )
    return SampledRows(*found)


def single(entries: Entries, rows: Rows, sampled: torch.Tensor) -> torch.Tensor:
    """Returns the ids of the tokens of a step in which each row computes one, int32 [rows]; see `spread`."""
    found = torch.empty_like(rows.alone)
    kernels.single[(cdiv(len(found), _BLOCK),)](
        entries.place,
        entries.inputs,
        rows.alone,
        rows.ids,
        sampled,
        found,
        len(found),
        entries.inputs.shape[1],
        BLOCK=_BLOCK,
    )
    return found


def spread(entries: Entries, rows: Rows, tokens: int, tile: int, sampled: torch.Tensor) -> Tokens:
    """Reads the step's tokens, at most `tokens`, and cuts those of rows with several into tiles of `tile`. A token that
    is the row's previous sample is read from `sampled`, int32 [row ids]."""
    many = rows.numbers.shape[1]
    most = tokens // tile + min(many, tokens // 2)
    found = torch.empty((3, tokens), device=sampled.device, dtype=torch.int32)
    tiles = torch.empty((most, 4), device=sampled.device, dtype=torch.int32)
    kernels.spread[(cdiv(tokens, _SPREAD),)](
        entries.place,
        entries.counts,
        entries.inputs,
        rows.numbers,
        sampled,
        found,
        tiles,
        many,
        tokens,
        most,
        entries.inputs.shape[1],
        entries.counts.shape[1],
        TILE=tile,
        BLOCK=_SPREAD,
        CHUNK=_CHUNK,
    )
    ids, owners, positions = found
    return Tokens(ids, owners, positions, tiles)


def adapters_of(rows: Rows, tokens: int) -> torch.Tensor:
    """Returns the slots of the adapters of the step's tokens, at most `tokens`, int64 [tokens]; 0 without one."""
    found = torch.empty(tokens, device=rows.numbers.device, dtype=torch.int64)
    kernels.adapters_of[(cdiv(tokens, _SPREAD),)](
        rows.numbers, found, rows.numbers.shape[1], tokens, ADAPTER=ADAPTER, BLOCK=_SPREAD, CHUNK=_CHUNK
    )
    return found


def change(entries: Entries, number: int, table: torch.Tensor) -> None:
    """Makes the step's changes of page table `number`, int32 [row ids, pages]."""
    most = entries.changes.shape[2]
    kernels.change[(cdiv(most, _BLOCK),)](
        entries.place,
        entries.counts,
        entries.changes,
        table,
        table.stride(0),
        most,
        entries.counts.shape[1],
        entries.changes.shape[1],
        NUMBER=number,
        CHANGED=CHANGED,
        BLOCK=_BLOCK,
    )


def allow(entries: Entries, logits: torch.Tensor) -> None:
    """Sets the logits of tokens that the step's masks do not allow to minus infinity. `logits`: float32 [samples,
    vocab], with contiguous rows."""
    samples, vocab = logits.shape
    kernels.allow[(samples, cdiv(vocab, 32 * _WORDS))](
        entries.place,
        entries.counts,
        entries.masked,
        entries.masks,
        logits,
        vocab,
        logits.stride(0),
        entries.masked.shape[1],
        entries.masks.shape[1],
        entries.masks.shape[2],
        entries.counts.shape[1],
        WORDS=_WORDS,
    )


def report(entries: Entries, chosen: torch.Tensor, ids: torch.Tensor, top: torch.Tensor) -> None:
    """Writes the log-probabilities of the step's samples, which are results of `torch_sampling.score`, where the host
    reads them. `ids` and `top` have at most `MAX_LOGPROBS` columns."""
    samples, width = ids.shape
    kernels.report[(cdiv(samples * max(width, 1), _BLOCK),)](
        entries.place,
        entries.counts,
        chosen,
        ids,
        top,
        entries.chosen,
        entries.top_tokens,
        entries.top,
        samples,
        width,
        ids.stride(0),
        top.stride(0),
        entries.chosen.shape[1],
        entries.counts.shape[1],
        LIKELIEST=MAX_LOGPROBS,
        BLOCK=_BLOCK,
    )


def finish(entries: Entries, sampling: Sampling, found: torch.Tensor, sampled: torch.Tensor) -> None:
    """Ends the step, whose samples are the tokens `found`, int64 [samples], and puts the last of each row into
    `sampled`, int32 [row ids]."""
    kernels.finish[(cdiv(len(found), _BLOCK),)](
        entries.turn,
        entries.place,
        entries.counts,
        sampling.owners,
        found,
        sampled,
        entries.tokens,
        len(found),
        entries.tokens.shape[1],
        entries.counts.shape[1],
        ENTRIES=len(entries.tokens),
        BLOCK=_BLOCK,
    )
