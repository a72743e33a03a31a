"""The interface in the manner of openai."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(tags=["openai"])
