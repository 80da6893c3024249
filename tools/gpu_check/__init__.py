"""What ``make gpu-check`` runs on a CUDA device: are the Triton kernels right, invariant, and how near its limits?

Imports torch; triton only once there is a device (tests run the first two parts by Triton's interpreter, in miniature).
"""
