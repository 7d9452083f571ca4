"""Programs that try to get out of the sandbox, and programs that are wrong and try to be judged right."""

FREE = """
import gc, os as real
class Os:
    O_WRONLY = O_RDWR = O_CREAT = O_TRUNC = O_APPEND = 0
    def __getattr__(self, name): return getattr(real, name)
for held in gc.get_objects():  # switches Python's audit hook off
    if type(held) is dict and type(held.get("REFUSALS")) is tuple:
        held["REFUSALS"], held["os"] = (), Os()
import ctypes, posix
libc = ctypes.CDLL(None, use_errno=True)
"""
SEGMENT = "s = libc.shmget({key}, ctypes.c_size_t(128 << 20), 0o1600)\nassert s >= 0"
OUT = {
    "unix_socket": "import _socket\ns = _socket.socket(_socket.AF_UNIX)\ns.connect('{folder}/socket')\ns.send(b'out')",
    "abstract_socket": "import _socket\ns = _socket.socket(_socket.AF_UNIX)\ns.connect('\\0{name}')\ns.send(b'out')",
    "tcp": "import _socket\ns = _socket.socket()\ns.connect(('127.0.0.1', {port}))\ns.send(b'out')",
    "netlink": "import _socket\n_socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 0)",
    "shared_memory_past_the_limit": "libc.shmat.restype = ctypes.c_void_p\nfor i in range(8):\n"
    "    s = libc.shmget(0, ctypes.c_size_t(128 << 20), 0o1600)\n    assert s >= 0\n"
    "    p = libc.shmat(s, None, 0)\n    assert p not in (None, 2**64 - 1)\n    libc.shmctl(s, 0, None)\n"
    "    libc.shmdt(ctypes.c_void_p(p))",
    "shared_memory_left_behind": "assert libc.shmget({key}, ctypes.c_size_t(1 << 20), 0o1600) >= 0",
    "message_queue": "assert libc.msgget({key}, 0o1600) >= 0",
    "memory_file": "posix.memfd_create('x')",
    "prlimit_cpu_of_the_parent": "import resource\n"
    "resource.prlimit(posix.getppid(), resource.RLIMIT_CPU, (10**6, 10**6))",
    "prlimit_files_of_the_parent": "import resource\n"
    "resource.prlimit(posix.getppid(), resource.RLIMIT_NOFILE, (900, 900))",
    "signal_to_the_parent": "posix.kill(posix.getppid(), 0)",
    "signal_to_all": "posix.kill(-1, 0)",
    "signals_by_descriptor": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, posix.getppid())",
    "ptrace": "assert libc.ptrace(0x4206, posix.getppid(), None, None) == 0",
    "memory_of_the_parent": "posix.open(f'/proc/{{posix.getppid()}}/mem', 0)",
    "process_vm_readv": "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    "b = ctypes.create_string_buffer(8)\nv = V(ctypes.addressof(b), 8)\n"
    "assert libc.process_vm_readv(posix.getppid(), ctypes.byref(v), 1, ctypes.byref(v), 1, 0) == 8",
    "environment_of_the_trainer": "d = posix.open('/proc/{trainer}/environ', 0)\n"
    "assert b'SECRET_OF_THE_TRAINER' in posix.read(d, 1 << 20)",
    "file_of_the_user": "d = posix.open('{folder}/secret', 0)\nassert posix.read(d, 9)",
    "folder_in_a_shared_one": "posix.mkdir('{folder}/made')",
    "file_in_a_shared_folder": "posix.open('{folder}/written', posix.O_WRONLY | posix.O_CREAT)",
    "link_in_a_shared_folder": "posix.symlink('/', '{folder}/linked')",
    "file_in_shared_memory": "posix.open('/dev/shm/{name}', posix.O_WRONLY | posix.O_CREAT)",
    "removed_file": "posix.unlink('{folder}/kept')",
    "fork": "if posix.fork() == 0: posix._exit(0)",
    "thread": "import _thread\n_thread.start_new_thread(print, ())",
    "user_namespace": "assert libc.unshare(0x10000000) == 0",
    "io_uring": "b = ctypes.create_string_buffer(120)\nassert libc.syscall(425, 4, b) >= 0",
    "another_kernel_interface": "assert libc.personality(ctypes.c_ulong(0x0040000)) >= 0",
}
"""Programs that pass where they got out. Braces are filled in with what the test watches."""

W = "f = lambda x: 0\n"
EVERYWHERE = "import os\nfor d in range(64):\n    for said in (b'\\0' * 64, b'v' + b'\\0' * 40):\n"
EVERYWHERE += "        try: os.write(d, said)\n        except OSError: pass\n"
EQUAL = "    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
EQUAL += "    __hash__ = object.__hash__\n"
ZERO = "    def __sub__(self, other): return {of}\n    def __abs__(self): return 0.0\n"
ZERO += "    def __lt__(self, other): return True\n"
PLAIN = ("assert f(1) == 4", "assert f(2) == 5", "assert f(10) == 13")
CLOSE = ("assert abs(f(1) - 4) < 1e-6",)
FORGERIES = {
    "writes_to_every_descriptor": (W + EVERYWHERE, PLAIN),
    "writes_and_waits": (W + EVERYWHERE + "import time\ntime.sleep(0.2)", PLAIN),
    "finds_the_pipe_by_frames": (
        W + "import sys, os\nfr = sys._getframe()\nwhile fr:\n    for d in list(fr.f_locals.values()):\n"
        "        if type(d) is int and 2 < d < 64:\n            os.write(d, b'\\0' * 64)\n    fr = fr.f_back",
        PLAIN,
    ),
    "replaces_the_judge": (
        W + "import sys\nfr = sys._getframe()\nwhile fr:\n    v = fr.f_globals.get('Verdict')\n"
        "    for name in ('judge', 'execute', 'of_error'):\n"
        "        if v and name in fr.f_globals: fr.f_globals[name] = lambda *given: v.PASSED\n    fr = fr.f_back",
        PLAIN,
    ),
    "equals_everything": ("class E:\n" + EQUAL + "f = lambda x: E()", PLAIN),
    "is_a_number_that_equals_everything": ("class E(int):\n" + EQUAL + "f = lambda x: E(1)", PLAIN),
    "equals_in_a_list": ("class E:\n" + EQUAL + "f = lambda x: [E()]", ("assert f(1) == [4]", "assert 4 in f(1)")),
    "contains_everything": (
        "class E:\n    def __contains__(self, x): return True\n    def __iter__(self): return iter([1])\n"
        "f = lambda x: E()",
        ("assert 4 in f(1)",),
    ),
    "is_close_to_everything": ("class E:\n" + ZERO.format(of="0.0") + "f = lambda x: E()", CLOSE),
    "stays_close_to_everything": ("class E:\n" + ZERO.format(of="self") + "f = lambda x: E()", CLOSE),
    "is_beyond_everything": (
        "class E:\n    __lt__ = __gt__ = lambda self, other: True\nf = lambda x: E()",
        ("assert 3 < f(1) < 5", "assert f(1) > 3 and f(1) < 5"),
    ),
    "says_yes": (
        "class E:\n    def __getattr__(self, name): return lambda *given: True\nf = lambda x: E()",
        ("assert f(1).startswith('4')", "assert f(1).isdigit()"),
    ),
    "another_abs": (W + "abs = lambda x: 0.0", CLOSE),
    "another_module": (
        W + "import unittest.mock as math\nmath.isclose = lambda *given: True",
        ("assert math.isclose(f(1), 4)",),
    ),
    "an_object_of_the_library_that_equals_everything": ("from unittest.mock import ANY\nf = lambda x: ANY", PLAIN),
    "another_assertion_error": (W + "import builtins\nclass A(Exception): pass\nbuiltins.AssertionError = A", PLAIN),
    "reads_the_tests": (
        "import gc, re, sys\nfr, found = sys._getframe(), []\nwhile fr:\n"
        "    found += [repr(v) for v in fr.f_locals.values()]\n    fr = fr.f_back\n"
        "found += [repr(o)[:100000] for o in gc.get_objects() if type(o) in (list, dict, tuple) and len(o) < 99]\n"
        "T = {int(m[1]): int(m[2]) for t in found for m in re.finditer(r'assert f\\((\\d+)\\) == (\\d+)', t)}\n"
        "f = lambda x: T.get(x, 0)",
        PLAIN,
    ),
    "exits_as_if_it_passed": (W + "import os\nos._exit(64)", PLAIN),
    "ends_in_the_call": ("import os\nf = lambda x: os._exit(64)", PLAIN),
    "speaks_for_the_test": (
        "import gc, os\nsaid = b'v' + b'0' * 32 + b'\\0'\ndef f(x):\n    for d in range(3, 64):\n"
        "        try: os.write(d, len(said).to_bytes(8, 'little') + said)\n        except OSError: pass\n    return 0",
        PLAIN,
    ),
}
"""Programs of which a test must fail, and those tests. None of them may have the verdict that they passed."""
