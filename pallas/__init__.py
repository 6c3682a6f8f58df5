"""Home of the fused Pallas kernels of the decode step, one module or package per op."""
