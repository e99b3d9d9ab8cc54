"""Layouts of a model on GPUs: sharding, pipeline stages, communication."""
