"""`python -m pytest_ddpperf`: the same as the `ddpperf` command."""

import sys

from pytest_ddpperf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
