"""The interface in the manner of sglang."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(tags=["sglang"])
