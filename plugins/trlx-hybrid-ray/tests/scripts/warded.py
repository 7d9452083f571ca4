"""Run by test_launch_warden.py as if it were a rank: gets a warden, then does what it is asked to."""

import os
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory

from trlx_hybrid_ray.launch.rank import Order, _tell, _with_warden

host, port, secret, what = sys.argv[1:]
order = Order(rank=0, environment={}, folder=None, script="", arguments=(), host=host, port=int(port), secret=secret)
control = _with_warden(order)
print("first line")
print("to stderr", file=sys.stderr)
if what == "lines":
    for number in range(20_000):
        print(f"line {number}")
elif what == "leave":
    tag = sys.executable, "-c", "import time; time.sleep(600)"
    children = [subprocess.Popen(tag), subprocess.Popen(tag, start_new_session=True)]
    if (forked := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # as for code that knows nothing of Python's tracker
    _tell(control, "left", pids=[child.pid for child in children] + [forked], segment=segment.name)
    time.sleep(600)
elif what == "sleep":
    _tell(control, "asleep")
    time.sleep(600)
os.kill(os.getpid(), 9)
