"""Drafts: the server computes a message while the user is still typing, so the answer begins sooner."""

import time

import tenuto

TYPED = "Please tell me in one sentence what the capital of France is and why so many people like to go there."


def ask(session: tenuto.Session, *, drafting: bool) -> None:
    """Send `TYPED` after a while, with or without telling the session what is there so far."""
    words = TYPED.split()
    for count in range(4, len(words), 4):
        if drafting:
            session.draft([{"role": "user", "content": " ".join(words[:count])}])
        time.sleep(0.2)  # someone types
    answer = session.chat(TYPED, max_new_tokens=8)
    usage = answer.result().usage
    print(
        f"{'with' if drafting else 'without'} drafts: {usage.cached} of {usage.prompt} prompt tokens were there "
        f"already, first token after {answer.time_to_first_token:.2f} s"
    )


with tenuto.Engine(context_length=1024) as engine:
    ask(engine.session(), drafting=False)
    ask(engine.session(), drafting=True)
