"""Counts of tokens in Anthropic's form."""

from __future__ import annotations

from tenuto.base.turns import Usage
from tenuto.serve.shared.edge import Edge


def usage_of(edge: Edge, usage: Usage) -> dict[str, int]:
    """Returns a turn's counts of tokens. Those that were computed and fill whole pages can be found again by requests
    with the same beginning, and count as created."""
    model = edge.model
    kept = usage.prompt - usage.prompt % model.page_size if model.config.prefix_cache else 0
    created = max(0, kept - usage.cached)
    return {
        "input_tokens": usage.prompt - usage.cached - created,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": created,
        "output_tokens": usage.generated,
    }
