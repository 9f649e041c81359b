"""Where Triton's kernels run in tests: compiled on a CUDA GPU if one is asked for, else in Triton's interpreter.

`tests/conftest.py` asks for the interpreter, `make gpu-check` for the GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from manta.workers.kernels.triton.launch import INTERPRETED
from tests.conftest import PROVE
from tests.workers import triton_interpreter

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton's kernels need a CUDA GPU, or TRITON_INTERPRET=1", allow_module_level=True)

if INTERPRETED:
    triton_interpreter.accelerate()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
THOROUGH = PROVE or DEVICE.type == "cuda"
"""Larger and random shapes, which take minutes in the interpreter."""
NEEDS_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU: run it with make gpu-check")
