"""Several answers to one question: the prompt is computed once, and every sample is a fork of it."""

import tenuto

with tenuto.Engine(context_length=1024) as engine:
    asked = engine.session(system="You name things.")
    asked.append([{"role": "user", "content": "Give me one name for a black cat."}])
    samples = [asked.fork().turn(temperature=0.9, seed=seed, max_new_tokens=12) for seed in range(4)]
    for sample in samples:
        usage = sample.result().usage
        print(f"{sample.text!r}: {usage.cached} of {usage.prompt} prompt tokens were there already")
    print(engine.audit())
