"""The ``triton`` backend: every operation as kernels that Triton compiles for the GPU at hand.

A module has the name of its operation in :mod:`hdet_kernels.ops` and gives the bits of :mod:`hdet_kernels.ops.torch`,
where the arithmetic is the same. All kernels walk the tables that the compiled backends walk. The other modules have
what kernels share: :mod:`.rules` (the update rules), :mod:`.rounding` and :mod:`.companding` (how numbers are stored).
"""
