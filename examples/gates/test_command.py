"""A program like torchtitan, by its own command and its own log: `step: 10 loss: 2.31 tps: 1,234`.

    pytest examples/gates/test_command.py --ddp-against HEAD~1

The gate: 5 % fewer tokens a second, or a run that takes 20 % longer, is red, with an error rate of
1.5 %. `skip=1` leaves out the first line of the log, which is warm-up.
"""

from typing import Any

import pytest

from pytest_ddpperf import Figure

TPS = Figure(pattern=r"tps: ([\d,]+)", better="higher", skip=1)
LAUNCHER = ["torchrun", "--standalone", "--nproc-per-node=2"]


@pytest.mark.ddp(threshold="tps:5%,wall:20%")
def test_train(ddp_benchmark: Any, pytestconfig: pytest.Config) -> None:
    program = pytestconfig.rootpath / "examples/programs/titan.py"
    ddp_benchmark.command([*LAUNCHER, program], figures={"tps": TPS})
