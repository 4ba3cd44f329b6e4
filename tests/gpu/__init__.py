"""Properties of training on a CUDA device that no single module has: determinism, and streams under forced delays."""
