"""`trlx_hybrid.testing.processes`: scripts in forked processes are as scripts started by themselves."""

import signal

import pytest
from trlx_hybrid.testing.processes import Script, rank_reports, start_ranks, wait_all


@pytest.fixture
def script(tmp_path):
    def write(source):
        (tmp_path / "script.py").write_text(source)
        return tmp_path / "script.py"

    return write


def test_a_script_is_main_with_its_arguments(script):
    (script("").parent / "beside.py").write_text("VALUE = 5")
    source = "import atexit, sys, beside\natexit.register(print, 'left')\nprint(__name__, sys.argv[1:], beside.VALUE)"
    ended = Script(script(source), "one", 2).wait(60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "__main__ ['one', '2'] 5\nleft\n"


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import os; os._exit(9)", 9, ""),
        ("raise ValueError('no such thing')", 1, "ValueError: no such thing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_how_it_ended(script, source, code, said):
    ended = Script(script(source)).wait(60)
    assert ended.returncode == code
    assert said in ended.stderr


def test_a_script_that_hangs_is_killed_and_says_what_it_had_written(script):
    hanging = Script(
        script("import sys, time; print('waiting for Godot', file=sys.stderr, flush=True); time.sleep(99)")
    )
    with pytest.raises(TimeoutError, match=r"still running after 5 s.*\n.*waiting for Godot"):
        hanging.wait(5)


def test_the_stack_is_there_from_the_start_and_the_environment_is_the_scripts_own(script, monkeypatch):
    source = script("import os, sys; print('trl' in sys.modules, os.environ.get('SEEN_BY_THE_SCRIPT'))")
    monkeypatch.setenv("SEEN_BY_THE_SCRIPT", "yes")
    assert Script(source).wait(60).stdout == "True yes\n"
    monkeypatch.delenv("SEEN_BY_THE_SCRIPT")
    assert Script(source).wait(60).stdout == "True None\n"


def test_what_engines_would_look_for_at_each_start_is_found(script):
    source = (
        "import os\n"
        "from vllm.model_executor.models.registry import _run_in_subprocess\n"
        "from vllm.platforms import current_platform\n"
        "print(_run_in_subprocess(os.getpid) == os.getpid())\n"
        "print(current_platform.register_triton_kernel_overrides.cache_info().currsize)\n"
    )
    assert Script(script(source)).wait(60).stdout == "True\n1\n"


def test_ranks_meet(script, tmp_path):
    source = (
        "import json, os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "report = {'total': int(total), 'local': os.environ['LOCAL_RANK']}\n"
        "json.dump(report, open(f'{sys.argv[1]}/rank{dist.get_rank()}.json', 'w'))\n"
    )
    reports = rank_reports(script(source), tmp_path, count=2)
    assert reports == [{"total": 3, "local": "0"}, {"total": 3, "local": "1"}]


def test_one_late_rank_ends_all(script):
    source = "import os, time; time.sleep(99 if os.environ['RANK'] == '1' else 0)"
    with pytest.raises(TimeoutError, match="after 2 s"):
        wait_all(start_ranks(script(source), count=3), 2)


def test_a_failed_rank_shows_its_error(script, tmp_path):
    source = "import os; assert os.environ['RANK'] == '0', 'rank one is wrong'"
    with pytest.raises(AssertionError, match="rank one is wrong"):
        rank_reports(script(source), tmp_path, count=2)
