"""Engines that die at the worst moment, tensor parallelism, and several ranks that share engines."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import trlx_hybrid
from datasets import Dataset
from trlx_hybrid import HybridConfig
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.types import Sampling
from trlx_hybrid_ray.reaper import OWNER_VARIABLE

sys.path.insert(0, str(Path(__file__).parent))
from launching import SCRIPTS, Segments, launch, nothing_left, ours, reports, without_ray
from remote_training import Trained, core_of, gone, no_segments, pids, requests_of, tokens

pytestmark = pytest.mark.slow
SAMPLING = Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})


@pytest.fixture
def trained(session_cluster, tmp_path):
    made = []

    def train(**options):
        weights = options.pop("weights_options", None)
        config = HybridConfig(
            engine="remote",
            engine_options=options,
            **({"weights": "transfer", "weights_options": weights} if weights else {}),
        )
        made.append(Trained(tmp_path / str(len(made)), config))
        return made[-1]

    yield train
    for one in made:
        one.session.close()


def killed_in_mid_rollout(engine, victim="actor"):
    """Tokens of requests whose first engine's actor, or vLLM's engine core in it, is killed while it samples."""
    requests, processes = requests_of(24), pids(engine)[0]
    pid = processes[0] if victim == "actor" else core_of(processes)
    with engine.stream(SAMPLING) as stream:
        keys = [stream.add(request) for request in requests]
        found = dict(stream.step(True)[0])
        os.kill(pid, signal.SIGKILL)
        while stream.busy:
            found.update(stream.step(True)[0])
    return tokens([found[key] for key in keys])


def test_a_dead_engine_is_replaced_and_gets_the_weights_of_the_next_sync(trained, tmp_path):
    segments = Segments()
    one = trained(replicas=2)
    session, engine = one.session, one.session.live_engine
    with session.rollout_phase(training=False):
        expected = tokens(engine.generate(requests_of(24), SAMPLING))
        first, second = engine.servers
        victims, _ = pids(engine)
        assert killed_in_mid_rollout(engine) == expected
        assert engine.servers == (second,)
    gone([victims])
    with session.rollout_phase(training=False):
        assert len(engine.servers) == 2
        assert first not in engine.servers
        assert session.weights.check(full=True) == len(session.policy.checkpoint_names())
        assert tokens(engine.generate(requests_of(24), SAMPLING)) == expected
    left = pids(engine)
    session.close()
    gone(left)
    no_segments(segments)


@pytest.mark.parametrize("victim", ["actor", "engine core"])
def test_the_only_engine_dies_and_its_successor_gets_the_weights_at_once(trained, tmp_path, victim):
    segments = Segments()
    one = trained()
    engine = one.session.live_engine
    with one.session.rollout_phase(training=False):
        expected = tokens(engine.generate(requests_of(24), SAMPLING))
        processes = pids(engine)
        assert killed_in_mid_rollout(engine, victim) == expected
        gone(processes)
        assert one.session.versions.engine_version == one.session.versions.version
    left = pids(engine)
    one.session.close()
    gone(left)
    no_segments(segments)


def test_a_trainer_that_was_stopped_ends_no_engine_that_lives(trained, capfd):
    """Longer than an engine may be silent, while it samples and while it is asked whether it lives."""
    one = trained()
    engine, requests = one.session.live_engine, requests_of(24)
    stop = ["sh", "-c", f"kill -STOP {os.getpid()}; sleep 30; kill -CONT {os.getpid()}"]
    with one.session.rollout_phase(training=False):
        expected = tokens(engine.generate(requests, SAMPLING))
        (server,) = engine.servers
        with engine.stream(SAMPLING) as stream:
            keys = [stream.add(request) for request in requests]
            found = dict(stream.step(True)[0])
            subprocess.run(stop, check=True)
            while stream.busy:
                found.update(stream.step(True)[0])
        assert tokens([found[key] for key in keys]) == expected
    asking = subprocess.Popen(stop)
    for _ in range(1000):
        engine.restore()
        if asking.poll() is not None:
            break
        time.sleep(0.01)
    assert asking.wait() == 0
    assert engine.servers == (server,)
    assert " died: " not in capfd.readouterr().err


def test_where_nobody_may_be_replaced_the_error_names_the_engine_and_the_cause(trained):
    one = trained(restarts=0)
    engine = one.session.live_engine
    with one.session.rollout_phase(training=False):
        processes = pids(engine)
        with pytest.raises(EngineError, match=r"No remote engine is left: engine 0 \(node .*\) died: .*[Dd]ied"):
            killed_in_mid_rollout(engine)
    gone(processes)


def test_an_engine_that_dies_during_a_sync_is_replaced_and_the_sync_repeated(trained):
    one = trained(replicas=2)
    session, engine = one.session, one.session.live_engine
    weights = session.weights
    victim = pids(engine)[1]
    load = weights._joined_sender

    def die_first():
        sender = load()
        if victim:
            os.kill(victim[0], signal.SIGKILL)
            victim.clear()
        return sender

    weights._joined_sender = die_first
    session.weights_changed()
    with session.rollout_phase(training=False):
        assert len(engine.servers) == 2
        assert weights.check(full=True) == len(session.policy.checkpoint_names())


def test_tensor_parallel_engines_sample_what_others_do(trained, tmp_path):
    segments = Segments()
    other = Trained(tmp_path / "inside", HybridConfig(engine="vllm"))
    other.session.close()  # an engine that is built ends the others of this process
    one = trained(tensor_parallel_size=2)
    assert one.session.live_engine.plan.ranks == 2
    assert one.completions == other.completions
    assert one.losses == pytest.approx(other.losses, abs=1e-5)
    engine = one.session.live_engine
    with one.session.rollout_phase(training=False):
        (processes,) = pids(engine)
        assert len(processes) >= 4  # actor, core and two workers
        expected = tokens(engine.generate(requests_of(24), SAMPLING))
        assert killed_in_mid_rollout(engine) == expected
        gone([processes])
    left = pids(engine)
    one.session.close()
    gone(left)
    no_segments(segments)


def engine_processes():
    """What engines' actors have started, of this process's cluster; other tests may have some beside it."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if OWNER_VARIABLE in process.environ() and ours(process):
                found.add(process.pid)
    return found


def test_engines_end_with_a_trainer_that_is_killed(session_cluster, tmp_path):
    segments, others, log = Segments(), engine_processes(), tmp_path / "log"
    command = [sys.executable, str(SCRIPTS / "remote_grpo.py"), str(tmp_path), "steps=5000"]
    with log.open("w") as out:
        trainer = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ)
    try:
        deadline = time.monotonic() + 400
        while "sync 2:" not in log.read_text():
            assert trainer.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        started = engine_processes() - others
        assert started
    finally:
        trainer.kill()
        trainer.wait()
    gone([started])
    no_segments(segments)


class Maze:
    """Goes on for as many steps as the row says."""

    async def reset(self, row):
        self.row, self.said = row, []
        return f" door {row['door']}"

    async def step(self, completion):
        from trlx_hybrid_multiturn import Step

        await asyncio.sleep(0.001 * (self.row["door"] % 3))
        self.said.append(completion)
        return Step(observation=f"door {len(completion)}", done=len(self.said) > self.row["door"] % 4, reward=0.5)


def test_multi_turn_episodes_are_those_of_the_engine_inside(session_cluster, run):
    from trlx_hybrid_multiturn import episode_reward, episodes

    turns = ["left", "right", "forward", "a longer sentence"]
    batches = {}
    for name, options in {"vllm": None, "remote": {"replicas": 2}}.items():

        class Recording(trlx_hybrid.GRPOTrainer):
            def _generate(self, prompts, name=name):
                batches[name] = super()._generate(prompts)
                return batches[name]

        tokenizer = chat_tokenizer(turns)
        prompts = [[{"role": "user", "content": f"go {i * 7919 % 1000}"}] for i in range(8)]
        done = run(
            Recording,
            model=chatty_model(tokenizer, turns),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts, "door": list(range(8))}),
            reward_funcs=[episode_reward],
            rollout_func=episodes(Maze),
            hybrid=HybridConfig(engine=name, engine_options=options, rollout="multi_turn"),
            max_completion_length=200,
            max_steps=1,
            vllm_max_model_length=400,
        )
        done.close()
    prompt_ids, completion_ids, masks = zip(*(batches[name][:3] for name in ("vllm", "remote")))
    assert prompt_ids[0] == prompt_ids[1]
    assert completion_ids[0] == completion_ids[1]
    assert masks[0] == masks[1]


def test_ranks_of_a_launch_share_engines(two_nodes, capfd, tmp_path, monkeypatch):
    """FSDP2 over two actors samples from one engine in a third, and trains as with an engine inside."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    segments = Segments()
    config = tmp_path / "accelerate.yaml"
    from test_launch_grpo import CONFIG

    config.write_text(json.dumps(CONFIG))
    script, options = SCRIPTS / "remote_grpo.py", ("model=tiny", "fsdp=1")
    folders = {engine: tmp_path / engine for engine in ("vllm", "remote")}
    for folder in folders.values():
        folder.mkdir()
    inside = without_ray(script, folders["vllm"], "engine=vllm", *options)
    settings = {"nodes": 2, "config_file": str(config)}
    done = launch(capfd, tmp_path, script, folders["remote"], "engine=remote", *options, **settings)
    assert done.code == 0, done.err[-4000:]
    for mine, theirs in zip(reports(folders["remote"]), inside, strict=True):
        assert mine["weights"] == "transfer"
        assert mine["sharded"]
        assert mine["rewards"] == theirs["rewards"]
        assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert nothing_left(str(tmp_path), segments) == []
