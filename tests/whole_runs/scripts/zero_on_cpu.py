"""grpo.py under DeepSpeed without GPUs: its process group is made here, as accelerate makes it where there are some."""

import runpy
from pathlib import Path

import deepspeed

deepspeed.init_distributed("gloo")
runpy.run_path(str(Path(__file__).with_name("grpo.py")), run_name="__main__")
