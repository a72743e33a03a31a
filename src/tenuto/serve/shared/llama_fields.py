"""Fields of llama.cpp's requests that are not carried out, with the values that mean the same as their absence."""

from __future__ import annotations

from typing import Any

FINE_TUNING = (
    *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("min_keep", "mirostat_eta", "mirostat_tau", "n_discard", "n_keep", "xtc_threshold"),
)
"""Fields that tune features which this server does not have."""
LEFT: dict[str, tuple[Any, ...]] = {
    "cache_prompt": (None, True),
    "id_slot": (None, -1),
    "repeat_last_n": (None, -1, 64),
    "return_progress": (None, False),
}
"""Fields that are left undone."""
SAMPLERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), (None, 0)),
    **dict.fromkeys(("lora", "samplers"), (None, [])),
    "top_n_sigma": (None, -1, 0),
    "typical_p": (None, 1),
}
"""Fields that are refused."""
