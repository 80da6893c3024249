"""The kernels for CUDA devices, in Triton. Imported only where a model is loaded on one (and by their tests).

A row's bits depend on its own sequence alone: every sum runs in an order fixed by absolute position or by the shape of
the weights, and each kernel is one compiled program for every number of rows. ``TRITON_INTERPRET=1`` runs the same
code on a CPU, where tests compare it with the plain torch kernels.
"""
