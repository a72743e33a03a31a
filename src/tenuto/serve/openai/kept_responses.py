"""Stored responses that can be read again."""

from __future__ import annotations

from tenuto.serve.shared.kept import Kept


class KeptResponses(Kept):
    """The latest stored responses of a tenant. Sessions of older responses stay open."""
