"""`python -m bench` (`make bench`): every benchmark that needs no model."""

from bench import edge, engine_step, long_input

engine_step.main()
edge.main()
long_input.main()
