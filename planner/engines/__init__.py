"""Serving engines by version, their arguments, and deployments."""
