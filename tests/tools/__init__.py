"""Programs for those who change tests; no test needs them."""
