"""Where the Triton kernels are tested: on a CUDA device where there is one, else by Triton's interpreter on the CPU.

Triton decides when it is first imported, so this is imported before it; child processes are not told.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules or "TRITON_INTERPRET" in os.environ, "triton was imported before it was told"
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
"""The interpreter's bfloat16 is wrong."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
