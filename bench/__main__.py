"""`python -m bench` (`make bench`): every benchmark that needs no model."""

from bench import engine_step

engine_step.main()
