"""The maintainers' fits of the catalogs to public runs: `make fit`, `make pools`. No wheel has them."""
