"""Answers that need computing: in processes with limits, bounded in number, and cached."""
