"""How steady a machine is, and what keeps it from being steadier: facts and a measurement in, findings out."""
