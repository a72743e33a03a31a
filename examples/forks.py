"""Several futures of one conversation: fork it, let each fork go on, and keep the one you like best."""

import tenuto

TONES = ("Answer like a pirate.", "Answer in one short sentence.", "Answer as a list of three words.")

with tenuto.Engine(context_length=1024) as engine:
    session = engine.session(system="You are a friendly guide to the city of Rome.")
    session.chat("Which sight should I see first?", max_new_tokens=40).result()

    turns = [session.fork().chat(f"And then? {tone}", max_new_tokens=24) for tone in TONES]
    for tone, turn in zip(TONES, turns, strict=True):  # the forks run in the same steps
        usage = turn.result().usage
        print(f"{tone} {turn.text!r}\n[{usage.cached} of {usage.prompt} prompt tokens were there already]")

    short = session.fork(turn=1, session_id="short")  # a fork may begin at any turn, and have a name
    short.chat("Which sight should I avoid?", max_new_tokens=24).result()
    short.rewind(turn=1)  # takes the last turn back
    assert short.history == session.history
    print(engine.audit())  # units that several sessions share are counted once
