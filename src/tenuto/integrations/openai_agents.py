"""A session of OpenAI's agents, backed by sessions of a server: `pip install tenuto[openai-agents]`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from agents import ModelSettings, OpenAIConversationsSession, OpenAIProvider, RunConfig
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, NotFoundError


class TenutoSession(OpenAIConversationsSession):
    """The history of an agent's runs. Its items are a conversation on the server. Runs with its `run_config` go on from
    the state of the model there, which is forked where the items were changed.

    The conversation can be opened again by its id (`session_id`), also in another process, until the server ends.
    """

    def __init__(
        self, *, url: str, api_key: str | None = None, conversation_id: str | None = None, parent: str | None = None
    ) -> None:
        """`url`: the server's. `conversation_id`: an existing one; otherwise the first run creates one. `parent`: the
        one whose state this one's runs may begin with."""
        hooks = {"request": [self._name], "response": [self._note]}
        client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key=api_key or "none", http_client=DefaultAsyncHttpxClient(event_hooks=hooks)
        )
        super().__init__(conversation_id=conversation_id, openai_client=client)
        self.client = client
        self.states: list[str] = []
        """The ids of the server's sessions that have answered here, the latest last."""
        self._url = url
        self._api_key = api_key
        self._parent = parent

    def run_config(self, **options: Any) -> RunConfig:
        """Returns the configuration of runs in this session. `options`: others of `RunConfig`."""
        settings = ModelSettings(store=False).resolve(options.pop("model_settings", None))
        return RunConfig(model_provider=OpenAIProvider(openai_client=self.client), model_settings=settings, **options)

    async def fork(self) -> TenutoSession:
        """Returns a session with the same items, whose runs begin with the state of this one."""
        parent = await self._get_session_id()
        child = TenutoSession(url=self._url, api_key=self._api_key, parent=parent)
        await child.add_items(await self.get_items())
        return child

    async def clear_session(self) -> None:
        """Deletes the conversation and closes its sessions on the server. The next run begins another."""
        await super().clear_session()
        while self.states:
            with suppress(NotFoundError):  # the server may have closed it
                await self.client.delete(f"/sessions/{self.states[-1]}", cast_to=object)
            self.states.pop()

    async def close(self) -> None:
        """Closes the connection. The conversation stays."""
        await self.client.close()

    async def _name(self, request: Any) -> None:
        if self._session_id is not None:
            request.headers["x-session-id"] = self._session_id
            if self._parent is not None:
                request.headers["x-parent-session-id"] = self._parent

    async def _note(self, response: Any) -> None:
        if (state := response.headers.get("x-tenuto-session")) is not None:
            self.states = [*(known for known in self.states if known != state), state]
