"""What remote parts share: waits that count only the time in which this process ran, and GPUs of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trlx_hybrid_ray.waiting import replies, wait

CLOCK = "from trlx_hybrid_ray.waiting import RunningClock; clock = RunningClock(); {}; print(clock.now())"


def stopped(process, seconds):
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def test_time_in_which_a_process_was_stopped_does_not_count():
    work = "print('begun', flush=True); [(time.sleep(0.1), clock.now()) for _ in range(10)]"
    command = [sys.executable, "-c", "import time; " + CLOCK.format(work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        began = time.monotonic()
        stopped(process, 5)
        counted = float(process.communicate()[0])
    assert time.monotonic() - began > 5
    assert 1 <= counted < 4


def test_waits_end_and_say_who_is_late(session_cluster):
    import ray

    nap = ray.remote(num_cpus=0.1)(lambda seconds: time.sleep(seconds))
    soon, late = nap.remote(0), nap.remote(60)
    ray.get(soon, timeout=60)  # a worker for it may have to start
    began = time.monotonic()
    assert wait([soon, late], 3) == ([soon], [late])
    assert wait([late, soon], 60, count=1) == ([soon], [late])
    assert wait([], 60) == ([], [])
    came = replies({"late": late, "soon": soon}, 1)
    assert next(came) == ("soon", None)
    key, error = next(came)
    assert key == "late"
    assert isinstance(error, ray.exceptions.GetTimeoutError)
    assert str(error) == "no answer within 1 s"
    assert next(came, None) is None
    assert time.monotonic() - began < 50
    ray.cancel(late, force=True)


@pytest.mark.slow
def test_a_deadline_is_for_all_answers_together(session_cluster):
    import ray

    nap = ray.remote(num_cpus=0.1)(lambda seconds: time.sleep(seconds))
    ray.get([nap.remote(1), nap.remote(1)])  # so that both find a worker that runs
    soon, late = nap.remote(4), nap.remote(60)
    came = replies({"late": late, "soon": soon}, 8)
    assert next(came) == ("soon", None)
    began = time.monotonic()
    assert isinstance(next(came)[1], ray.exceptions.GetTimeoutError)
    assert time.monotonic() - began < 7  # of its own it would have 8
    ray.cancel(late, force=True)


@pytest.mark.slow
def test_a_trainer_that_was_stopped_for_longer_than_a_deadline_goes_on(session_cluster):
    script = Path(__file__).parent / "scripts" / "waiting.py"
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        for result in ("awake", "up", "[1.0]"):
            assert process.stdout.readline() == "calling\n"
            time.sleep(0.5)
            stopped(process, 8)
            assert process.stdout.readline() == f"returned {result}\n"
        assert process.wait(60) == 0


def test_actors_see_their_own_gpu_below_a_process_that_sees_all(two_nodes):
    """What a process starts inherits that Ray is to leave CUDA_VISIBLE_DEVICES alone, and all GPUs of the node."""
    import ray

    def start():
        from trlx_hybrid_ray.remote import remote_environment, remote_reward

        def visible(prompts, **columns):
            import os

            return [float(os.environ["CUDA_VISIBLE_DEVICES"])] * len(prompts)  # no number where there are several

        class Looking:
            def look(self) -> str:
                import os

                return os.environ["CUDA_VISIBLE_DEVICES"]

        with (
            remote_reward(visible, workers=2, gpus=1, cpus=0.1) as one,
            remote_environment(Looking, gpus=2, cpus=0.1) as two,
            remote_environment(Looking, cpus=0.1) as none,
        ):
            return one(prompts=["a", "b"]), two().look(), none().look()

    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    task = ray.remote(num_cpus=0.1, runtime_env={"env_vars": variables})(start)
    one, two, none = ray.get(task.remote(), timeout=120)
    assert len(one) == 2
    assert len(set(two.split(","))) == 2
    assert none == ""
