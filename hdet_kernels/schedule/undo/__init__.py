"""``copies.py`` copies tensors and optimizer state; ``undoing.py`` returns to the start."""
