"""Layouts of a model over GPUs: sharding, pipeline stages, communication."""
