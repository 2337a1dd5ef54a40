"""Step `search_lr`: finds the learning rate."""
