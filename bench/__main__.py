"""`python -m bench` (`make bench`): every benchmark that needs no model, but `bench.soak`, which takes minutes."""

from bench import edge, engine_step, long_input, tenants

engine_step.main()
edge.main()
long_input.main()
tenants.main()
