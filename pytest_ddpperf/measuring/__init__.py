"""One test's measurement from plan to outcome: `session` is a run's, `benchmark` one measurement's journey. Knows no
pytest, and not how anything is told."""
