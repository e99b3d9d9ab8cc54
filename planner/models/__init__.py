"""Model architectures from config.json, and weight formats."""
