"""Conversations of spoken words as sessions, without a framework."""

from __future__ import annotations

import asyncio
from typing import Any

from tenuto.client import connect_async
from tenuto.integrations.conversation import Conversation
from tests.serve.server import Server


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


async def said(conversation: Conversation, messages: list[dict[str, Any]], **options: Any) -> str:
    """Returns the whole text of an answer."""
    parts = conversation.answer(messages, temperature=0, max_new_tokens=16, **options)
    return "".join([part.text async for part in parts])


def test_a_stop_that_was_never_said_is_not_in_the_session(smollm2_server: Server) -> None:
    async def talk() -> None:
        first, others = Conversation(connect_async(smollm2_server.url)), []
        question, more = message("user", "Name a fruit."), message("user", "What colour is it?")
        whole = await said(first, [question])
        stopped = await said(first, [question], stop=[whole[5:8]])
        assert stopped == whole[:5]
        told = [question, message("assistant", stopped), more]
        assert first.usage is not None
        for conversation in (first, Conversation(connect_async(smollm2_server.url))):
            answer = await said(conversation, told)
            assert conversation.usage is not None
            others.append((answer, conversation.usage.prompt))
            await conversation.close()
        assert others[0] == others[1]

    asyncio.run(talk())
