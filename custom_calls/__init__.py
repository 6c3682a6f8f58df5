"""Home of the CUDA custom calls reached through the XLA FFI: the decode megakernel."""
