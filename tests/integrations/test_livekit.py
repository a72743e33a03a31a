"""LiveKit's agents from the package index, with the model that has a session. Transcripts come from the test instead of
a recognizer, and the loudspeaker plays silence; LiveKit itself decides what was heard of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal, Self

import pytest

from tests.integrations.heard import QUESTION, STORY, beginnings, open_sessions, turns_of
from tests.serve.server import Server

pytest.importorskip(
    "livekit.agents", reason="livekit-agents is not installed; python -m bench.clients livekit runs this"
)

from livekit import rtc
from livekit.agents import Agent, AgentSession, stt, tts
from livekit.agents.llm import function_tool
from livekit.agents.types import APIConnectOptions
from livekit.agents.voice import io
from livekit.agents.voice.transcription import TranscriptSynchronizer

from tenuto.integrations.livekit import LLM

RATE = 16000
SECONDS_A_WORD = 0.25


class Ears(stt.STT):
    """A recognizer that hears what the test says."""

    def __init__(self) -> None:
        super().__init__(capabilities=stt.STTCapabilities(streaming=True, interim_results=True))
        self.heard: asyncio.Queue[stt.SpeechEvent] = asyncio.Queue()

    async def _recognize_impl(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("it only streams")

    def stream(self, *, conn_options: APIConnectOptions, **_: Any) -> Hearing:
        return Hearing(stt=self, conn_options=conn_options)

    def hear(self, kind: stt.SpeechEventType, text: str = "") -> None:
        found = [stt.SpeechData(language="en", text=text)] if text else []
        self.heard.put_nowait(stt.SpeechEvent(type=kind, alternatives=found))


class Hearing(stt.RecognizeStream):
    async def _run(self) -> None:
        assert isinstance(self._stt, Ears)
        while True:
            self._event_ch.send_nowait(await self._stt.heard.get())


class Voice(tts.TTS):
    """Speaks as many seconds of silence as its text has words."""

    def __init__(self) -> None:
        super().__init__(capabilities=tts.TTSCapabilities(streaming=False), sample_rate=RATE, num_channels=1)

    def synthesize(self, text: str, *, conn_options: APIConnectOptions | None = None) -> Any:
        return Speaking(tts=self, input_text=text, conn_options=conn_options or APIConnectOptions())


class Speaking(tts.ChunkedStream):
    async def _run(self, output: tts.AudioEmitter) -> None:
        output.initialize(request_id="one", sample_rate=RATE, num_channels=1, mime_type="audio/pcm")
        output.push(bytes(2 * int(RATE * SECONDS_A_WORD) * len(self.input_text.split())))
        output.flush()


class Microphone(io.AudioInput):
    """Silence."""

    def __init__(self) -> None:
        super().__init__(label="silence")

    async def __anext__(self) -> rtc.AudioFrame:
        await asyncio.sleep(0.05)
        return rtc.AudioFrame(bytes(2 * RATE // 20), RATE, 1, RATE // 20)


class Loudspeaker(io.AudioOutput):
    """Plays at the speed of speech."""

    def __init__(self) -> None:
        super().__init__(label="speaker", capabilities=io.AudioOutputCapabilities(pause=False), sample_rate=RATE)
        self.started: float | None = None
        self._seconds = 0.0
        self._ending: asyncio.TimerHandle | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        self._seconds += frame.duration
        if self.started is None:
            self.started = time.monotonic()
            self.on_playback_started(created_at=time.time())

    def flush(self) -> None:
        super().flush()
        if self.started is not None:
            rest = self.started + self._seconds - time.monotonic()
            self._ending = asyncio.get_running_loop().call_later(max(0.0, rest), self._end, False)

    def clear_buffer(self) -> None:
        if self.started is not None:
            self._end(True)

    def _end(self, interrupted: bool) -> None:
        if self._ending is not None:
            self._ending.cancel()
        assert self.started is not None
        played = min(time.monotonic() - self.started, self._seconds)
        self.started, self._seconds = None, 0.0
        self.on_playback_finished(playback_position=played, interrupted=interrupted)

    @property
    def played(self) -> float:
        return time.monotonic() - self.started if self.started is not None else 0.0


class Transcript(io.TextOutput):
    """The text that the user reads while the agent speaks."""

    def __init__(self) -> None:
        super().__init__(label="transcript", next_in_chain=None)

    async def capture_text(self, text: str) -> None: ...

    def flush(self) -> None: ...


class Talk:
    """An agent's session without a room."""

    def __init__(self, server: Server, *, max_new_tokens: int, tools: Any = (), preemptive: bool = False) -> None:
        self.model = LLM(url=server.url, options={"max_new_tokens": max_new_tokens})
        self.usage: list[Any] = []
        self.model.on("metrics_collected", self.usage.append)
        self.agent = Agent(instructions="You tell stories.", tools=list(tools))
        self.ears, self.speaker = Ears(), Loudspeaker()
        endpointing = {"min_delay": 0.2, "max_delay": 0.3}
        handling: Any = {
            "turn_detection": "stt",
            "endpointing": endpointing,
            "preemptive_generation": {"enabled": preemptive},
            "interruption": {"mode": "vad", "min_words": 2},
        }
        self.session: Any = AgentSession(
            llm=self.model, stt=self.ears, tts=Voice(), vad=None, turn_handling=handling, aec_warmup_duration=None
        )
        self.model.draft_for(self.session)

    async def __aenter__(self) -> Self:
        synchronizer = TranscriptSynchronizer(
            next_in_chain_audio=self.speaker, next_in_chain_text=Transcript(), speed=1 / SECONDS_A_WORD / 3
        )
        self.session.input.audio = Microphone()
        self.session.output.audio = synchronizer.audio_output
        self.session.output.transcription = synchronizer.text_output
        await self.session.start(self.agent)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.aclose()
        await self.model.aclose()

    @property
    def messages(self) -> list[Any]:
        return [item for item in self.session.history.items if item.type == "message"]

    @property
    def on_server(self) -> str:
        assert self.model.conversation.session_id is not None
        return self.model.conversation.session_id

    async def say(self, text: str) -> None:
        """The user speaks. All transcripts but the last may still change."""
        self.ears.hear(stt.SpeechEventType.START_OF_SPEECH)
        for heard in beginnings(text):
            self.ears.hear(stt.SpeechEventType.INTERIM_TRANSCRIPT, heard)
            await asyncio.sleep(0.2)
        self.ears.hear(stt.SpeechEventType.FINAL_TRANSCRIPT, text)
        self.ears.hear(stt.SpeechEventType.END_OF_SPEECH)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


def test_an_interrupted_agent_keeps_what_was_heard_and_computes_while_the_user_speaks(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with Talk(smollm2_server, max_new_tokens=1900) as talk:
            talk.model.options["ignore_eos"] = True
            await talk.say(STORY)
            await talk.until(lambda: talk.speaker.played > 2)
            talk.model.options["max_new_tokens"] = 16
            await talk.say(QUESTION)
            await talk.until(lambda: len(talk.usage) == 2)
            assert talk.messages[1].interrupted
            heard = talk.messages[1].text_content
            assert 4 <= len(heard.split()) < 30
            first, second = turns_of(smollm2_server, talk.on_server)
            assert first["output_text"] == heard  # tokens that were sampled, not the text encoded again
            assert QUESTION in second["input_text"]
            cancelled, answered = talk.usage
            assert cancelled.cancelled
            assert answered.prompt_cached_tokens > second["start"]  # more than the history: the draft

    asyncio.run(talk())
    assert not open_sessions(smollm2_server)


def test_an_answer_that_began_before_the_user_had_ended_is_the_one_that_is_heard(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with Talk(smollm2_server, max_new_tokens=8, preemptive=True) as talk:
            talk.ears.hear(stt.SpeechEventType.START_OF_SPEECH)
            talk.ears.hear(stt.SpeechEventType.PREFLIGHT_TRANSCRIPT, "Tell me a story")
            await talk.until(lambda: talk.usage)
            assert not talk.messages  # LiveKit does not know yet whether the user has ended
            talk.ears.hear(stt.SpeechEventType.FINAL_TRANSCRIPT, "Tell me a story about a ship.")
            talk.ears.hear(stt.SpeechEventType.END_OF_SPEECH)
            await talk.until(lambda: len(talk.messages) == 2)
            (turn,) = turns_of(smollm2_server, talk.on_server)
            assert "Tell me a story about a ship.<" in turn["input_text"]
            assert "".join(turn["output_text"].split()).startswith("".join(talk.messages[1].text_content.split()))

    asyncio.run(talk())
    assert not open_sessions(smollm2_server)


def test_a_function_is_called_and_its_result_is_the_next_turn(smollm2_server: Server) -> None:
    asked: list[int] = []

    @function_tool
    async def temperature(day: Literal[3]) -> str:
        """The temperature of a day."""
        asked.append(day)
        return "13 degrees"

    async def talk() -> None:
        async with Talk(smollm2_server, max_new_tokens=64, tools=[temperature]) as talk:
            talk.session.generate_reply(user_input="How warm is it on day 3?", tool_choice="required")
            await talk.until(lambda: len(talk.usage) == 2)
            assert asked == [3]
            assert "13 degrees" in turns_of(smollm2_server, talk.on_server)[1]["input_text"]
            call, answer = talk.usage
            assert answer.prompt_cached_tokens >= call.prompt_tokens

    asyncio.run(talk())
    assert not open_sessions(smollm2_server)
