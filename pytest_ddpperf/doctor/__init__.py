"""Checks of a machine: facts that decide how steady its measurements are, and advice."""
