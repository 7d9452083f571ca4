"""Our kernels in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys

BEGIN = """
import torch, triton, triton.language
import vllm.triton_utils
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # placeholders where there is no GPU
torch.manual_seed(0)
"""


def interpreted(script):
    """What a script prints, begun as above, in a process of its own; and its standard error."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", BEGIN + script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    return done.stdout, done.stderr
