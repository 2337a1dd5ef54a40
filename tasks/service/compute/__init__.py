"""Answers that need computing: processes that make them, kept and bounded."""
