"""One test's measurement, from plan to outcome. Knows no pytest."""
