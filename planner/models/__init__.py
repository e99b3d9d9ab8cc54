"""What a model is made of: its layers, from its own config.json, and the format that it is stored in."""
