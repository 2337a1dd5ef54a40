"""Step `validate`: checks data before anything is allocated."""
