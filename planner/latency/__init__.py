"""The cost of one engine step."""
