"""The `ddpperf` command: reports of runs that are over, as text and files. Imports neither pytest
nor torch.

`main` adds each subcommand by a function that says what it takes; `arguments.run` does it and
returns the exit status (see `console`). Modules import at their top what costs little, for `ddpperf
--help` imports all of them.
"""
