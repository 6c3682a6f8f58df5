"""The fused Pallas kernels of the decode step (Mosaic GPU, Hopper), one package per op.

:mod:`._launch` holds what they share. Nothing here needs a GPU to be imported: kernels compile for
one, and run on a CPU in Pallas's interpreter (``interpret=True``).
"""
