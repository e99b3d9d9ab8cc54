"""Models by name or `config.json`: their architecture and how their weights are stored."""
