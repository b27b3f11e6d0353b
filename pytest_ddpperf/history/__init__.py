"""Series of runs and the steps in them. Knows no pytest and measures nothing."""
