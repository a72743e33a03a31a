"""Errors in Ollama's form."""

from __future__ import annotations

from typing import Any

from tenuto.serve.shared.errors import ErrorForm
from tenuto.serve.shared.schemas import REFUSALS as USUAL

FORM = ErrorForm(lambda failure, _: {"error": failure.message})

_TEXT = {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": refusal["description"], "content": _TEXT} for status, refusal in USUAL.items()
}
