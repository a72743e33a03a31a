"""Prompts for filling in the middle of a text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tenuto.base.errors import Unsupported
from tenuto.base.wire.messages import StartTurn, Tokenize
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import Tenant

BETWEEN = "\n\n--- snippet ---\n\n"
"""The separator that llama.cpp writes before other files if the model has no tokens for file names."""
REPOSITORY, THIS_FILE = "repository", "this_file"
"""Names, as requests have none."""


async def fill_prompt(
    edge: Edge, tenant: Tenant, prefix: str, suffix: str, others: Iterable[tuple[str, str]] = ()
) -> list[int]:
    """Returns the tokens after which the model writes what belongs between `prefix` and `suffix`. `others`: names and
    texts of other files. Raises `Unsupported` if the model cannot do that."""
    tokens = edge.model.fill
    if tokens is None:
        raise Unsupported("this model has no tokens for filling in the middle of a text; allowed: other models")

    async def of(text: str) -> list[int]:
        found = array("i", await edge.link.call(Tokenize(tenant=tenant.name, input=text, generate=False))).tolist()
        begun = edge.model.adds_bos and found[:1] == [edge.model.bos_id]
        return found[1:] if begun else found

    prompt = [edge.model.bos_id] if edge.model.adds_bos and edge.model.bos_id is not None else []
    files = [*others]
    if files and tokens.repository is not None and tokens.file is not None:
        prompt += [tokens.repository, *await of(f"{REPOSITORY}\n")]
        for name, text in files:
            prompt += [tokens.file, *await of(f"{name}\n{text}")]
        prompt += [tokens.file, *await of(f"{THIS_FILE}\n")]
    else:
        for _, text in files:
            prompt += await of(BETWEEN + text)
    return [*prompt, tokens.prefix, *await of(prefix), tokens.suffix, *await of(suffix), tokens.middle]


def stopping(edge: Edge, start: StartTurn) -> StartTurn:
    """Returns the request for a turn that also stops where the model begins another file."""
    tokens = edge.model.fill
    further = (tokens.repository, tokens.file) if tokens is not None else ()
    stop_ids = (*start.params.stop_ids, *(token for token in further if token is not None))
    return msgspec.structs.replace(start, params=replace(start.params, stop_ids=stop_ids))
