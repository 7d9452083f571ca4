"""Holds all of a GPU but so many GiB, until it is killed."""

import sys
import time

import torch

if __name__ == "__main__":
    left, held = int(sys.argv[1]) << 30, []
    while (more := torch.cuda.mem_get_info()[0] - left) >= 1 << 21:  # a block that torch asks the driver for is larger
        held.append(torch.empty(more >> 21 << 21, dtype=torch.uint8, device="cuda"))
    sys.stdout.write("held\n")
    sys.stdout.flush()
    time.sleep(3600)
