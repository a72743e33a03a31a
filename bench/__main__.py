"""`python -m bench` (`make bench`): all benchmarks that need no model, except `bench.soak`, which takes minutes."""

from bench import commands, edge, engine_step, hybrid, long_input, tenants

engine_step.main()
commands.main()
hybrid.main()
edge.main()
long_input.main()
tenants.main()
