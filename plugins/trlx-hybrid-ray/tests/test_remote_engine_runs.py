"""Remote engines beside others: tensor parallelism, multi-turn, ranks that share them, a trainer that is killed."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import trlx_hybrid
from datasets import Dataset
from trlx_hybrid import HybridConfig
from trlx_hybrid.contract.types import Sampling
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_ray.reaper import OWNER_VARIABLE

sys.path.insert(0, str(Path(__file__).parent))
from launching import SCRIPTS, Segments, launch, nothing_left, ours, reports, without_ray
from remote_training import Trained, gone, killed_in_mid_rollout, no_segments, pids, requests_of, tokens

pytestmark = pytest.mark.slow
SAMPLING = Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})


def test_tensor_parallel_engines_sample_what_others_do(session_cluster, tmp_path):
    segments = Segments()
    other = Trained(tmp_path / "inside", HybridConfig(engine="vllm"), top_k=40)
    other.session.close()  # an engine that is built ends the others of this process
    options = {"tensor_parallel_size": 2}
    one = Trained(tmp_path / "remote", HybridConfig(engine="remote", engine_options=options), top_k=40)
    engine, requests = one.session.live_engine, requests_of(24)
    assert engine.plan.ranks == 2
    assert one.completions == other.completions
    assert one.losses == pytest.approx(other.losses, abs=1e-5)
    with one.session.rollout_phase(training=False):
        (processes,) = pids(engine)
        assert len(processes) >= 4  # actor, core and two workers
        expected = tokens(engine.generate(requests, SAMPLING))
        assert killed_in_mid_rollout(engine, requests, SAMPLING) == expected
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
            top_k=40,
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
    from tests.support.fsdp import FSDP2_FILE

    config.write_text(json.dumps(FSDP2_FILE))
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


def test_ranks_of_a_launch_share_engines_that_sample_while_they_train(two_nodes, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    segments, script = Segments(), SCRIPTS / "remote_grpo.py"
    done = launch(capfd, tmp_path, script, tmp_path, "staleness=2", nodes=2)
    assert done.code == 0, done.err[-4000:]
    ranks = [report["rows"] for report in reports(tmp_path)]
    prompts = Counter(tuple(prompt) for batches in ranks for batch in batches for prompt, _ in batch)
    assert set(prompts.values()) == {4}
    ages = [age for batches in ranks for batch in batches for _, row in batch for age in row]
    assert 0 < max(ages) <= 2
    assert nothing_left(str(tmp_path), segments) == []
