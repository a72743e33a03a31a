"""Guidance, whose grammars the server enforces."""

import re
import sys

from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel

model = VLLMModel("gpt-4o", base_url=f"{sys.argv[1]}/v1", api_key="none", echo=False)
with user():
    model += "Yes or no, and how often?"
with assistant():
    model += select(["yes", "no"], name="choice") + ": " + gen(name="count", regex="[0-9]{2}", max_tokens=8)
assert model["choice"] in ("yes", "no"), str(model)
assert re.fullmatch("[0-9]{2}", model["count"]), str(model)
