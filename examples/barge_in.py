"""A listener interrupts: the session keeps exactly what was heard, and goes on from there."""

import asyncio

import tenuto


async def main() -> None:
    """Tell a story, interrupt it, and ask about it."""
    engine = await asyncio.to_thread(tenuto.AsyncEngine, context_length=1024)
    async with engine:
        session = await engine.session(system="You tell stories.")
        story = session.chat("Tell me a story about the sea.", max_new_tokens=200)
        heard = 0
        async for piece in story:
            print(piece, end="", flush=True)
            heard += 1
            if heard == 15:
                break
        result = await story.abort(keep="delivered")
        print(f" --\n[kept {result.kept} tokens, the session has version {result.version}]")
        answer = session.chat("Wait! Where was that?", max_new_tokens=24)
        async for piece in answer:
            print(piece, end="", flush=True)
        usage = (await answer.result()).usage
        print(f"\n[{usage.cached} of {usage.prompt} prompt tokens were there already]")


asyncio.run(main())
