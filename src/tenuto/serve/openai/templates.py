"""Variables of the chat template in requests."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tenuto.base.tools.variables import Variables
from tenuto.serve.shared.objects import ForeignObject


class Templated(ForeignObject):
    """A request whose messages are rendered by the chat template."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as `enable_thinking`, for this turn."
    )

    def variables(self) -> Variables:
        """Returns the variables for the chat template. Raises `InvalidRequest`."""
        return Variables.of(self.chat_template_kwargs or {})
