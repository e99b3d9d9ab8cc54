"""Coefficients from measured runs: a machine's own, and those of the catalogs, each by a module that runs by itself."""
