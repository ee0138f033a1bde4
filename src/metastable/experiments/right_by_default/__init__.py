"""True numbers on data nobody prepared, with default settings throughout."""
