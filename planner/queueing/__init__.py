"""The analytical model: steady state of open and closed loops."""
