"""A history of runs: its files, its series, and the change points in them. Imports no pytest and
measures nothing."""
