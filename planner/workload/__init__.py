"""Requests: lengths, arrivals and traces."""
