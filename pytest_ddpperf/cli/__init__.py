"""The `ddpperf` command: reports of runs that are over, as text and files. Imports neither pytest nor torch.

A subcommand is a module here with `add_parser(subparsers)`, which says what it takes, and `run(arguments)`, which does
it and returns how the command ends (see `console`). Modules import at their top what costs nothing; what takes long to
import is imported where it is needed, for `ddpperf --help` imports all of them.
"""
