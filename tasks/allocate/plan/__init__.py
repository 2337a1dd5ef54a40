"""What a configuration is and what it costs."""
