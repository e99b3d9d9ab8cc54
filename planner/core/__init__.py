"""The ground: bytes, intervals and errors, and how catalogs are read."""
