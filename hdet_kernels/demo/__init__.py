"""``python -m hdet_kernels demo``: plain OneCycleLR against HDET on this machine, from the same poor learning rate."""
