"""Where the Triton kernels are tested: on a CUDA device where there is one, else by Triton's interpreter on the CPU.

``tests/conftest`` decides about the interpreter, before anything imports triton.
"""

import os

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("an NVIDIA driver, but torch has no CUDA device: the kernels run neither way", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
"""The interpreter's bfloat16 is wrong."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
