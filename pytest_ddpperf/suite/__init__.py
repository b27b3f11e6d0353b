"""The benchmarks that people who train on PyTorch run by hand, as tests: `pytest --pyargs
pytest_ddpperf.suite`.

Ordinary tests that use the plugin's public fixtures, markers and options only, as a user's could.
"""
