"""Programs that take the turns of a workload in their own process. Each runs with its peer's Python, so it may import
no other part of the benchmarks.

A line of standard input is a workload: `inputs`, the token ids of every turn of every session, and `output`, how many
tokens each turn generates. Its answer is a line of standard output: `seconds`, and of every turn its `number` from 1
on, when it `began`, `arrivals` (when tokens came, and how many), and the `prompt`, `cached` and `generated` tokens as
far as the engine says. The first line of standard output is the engine's version.
"""
