"""What a model costs on a device: its structure, time, memory and energy."""
