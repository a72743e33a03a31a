"""OpenAI's client on a session: with `session_id` it sends only new messages. Start a server first: `tenuto serve`."""

import os

from openai import OpenAI

URL = os.environ.get("TENUTO_URL", "http://127.0.0.1:8000")
QUESTIONS = ("Name a fruit.", "What colour is it?", "Name another one of that colour.")

with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TENUTO_API_KEY", "none")) as client:
    for question in QUESTIONS:
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"session_id": "fruit-talk"},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached, prompt = chunk.usage.prompt_tokens_details.cached_tokens, chunk.usage.prompt_tokens
                print(f"\n[{cached} of {prompt} prompt tokens were there already]")
