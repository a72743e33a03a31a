"""A voice assistant: it computes while the user speaks, speaks slower than it generates, and can be interrupted.

Speech is played as text here. The session keeps what was heard, not what was generated.
"""

import asyncio

import tenuto

HEARD_SO_FAR = ("Tell me", "Tell me about the", "Tell me about the planets,", "Tell me about the planets, please.")
SECONDS_A_WORD = 0.02
WORDS_UNTIL_INTERRUPTED = 12


async def speak(session: tenuto.AsyncSession, answer: tenuto.AsyncTurnStream, words: int) -> None:
    """Play an answer while it is generated. After so many words the user interrupts."""
    pieces: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()

    async def read() -> None:
        async for piece in answer:
            pieces.put_nowait((piece, len(answer.token_ids)))
        pieces.put_nowait(None)

    reading = asyncio.create_task(read())
    while (piece := await pieces.get()) is not None:
        text, heard = piece
        print(text, end="", flush=True)
        await asyncio.sleep(SECONDS_A_WORD)
        words -= 1
        if words == 0:
            result = await answer.abort(keep=heard)
            if result.kept > heard:  # all of it was generated before the interruption
                await session.rewind(position=result.usage.prompt + heard)
            print(f" --\n[{heard} tokens were heard and are kept]")
            break
    await reading


async def main() -> None:
    """Draft, answer, be interrupted, answer again."""
    engine = await asyncio.to_thread(tenuto.AsyncEngine, context_length=1024)
    async with engine:
        session = await engine.session(system="You are a voice assistant.")
        for text in HEARD_SO_FAR:  # from the recognizer
            await session.draft([{"role": "user", "content": text}])
            await asyncio.sleep(0.05)
        await speak(session, session.chat(HEARD_SO_FAR[-1], max_new_tokens=150), WORDS_UNTIL_INTERRUPTED)
        answer = session.chat("Stop. Which one is the largest?", max_new_tokens=24)
        await speak(session, answer, words=100)
        usage = (await answer.result()).usage
        print(f"\n[{usage.cached} of {usage.prompt} prompt tokens were there already]")


asyncio.run(main())
