"""Headroom: what to run to serve a model, to this traffic, at this latency, and what it costs."""

__version__ = "0.1.0"
