"""Step `analyze`: compares a run with earlier ones and writes the report."""
