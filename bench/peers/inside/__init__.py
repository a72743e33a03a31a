"""Programs that run a workload on an engine in their own process. Each runs with its peer's Python, so it must not
import other parts of the benchmarks.

A line of standard input is a workload: `inputs`, the token ids of every turn of every session, and `output`, the number
of tokens that each turn generates. The answer is a line of standard output: `seconds`, and for every turn its `number`
from 1 on, the time it `began`, its `arrivals` (times and numbers of tokens), and the numbers of `prompt`, `cached` and
`generated` tokens, if the engine reports them. The first line of standard output is the engine's version.
"""
