"""The examples with tools and environments, as a user starts them, shortened; and what they are made of."""

import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import Script

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SHORT = "--use_cpu --sft_steps 2 --max_steps 1 --per_device_train_batch_size 8 --per_device_eval_batch_size 8"
REPORT = re.compile(r"^.+: mean reward \d\.\d{3} before GRPO, \d\.\d{3} after$", re.MULTILINE)


def start(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = Script(*command, environment=environment).wait(400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


BUBBLEWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs the command bwrap")


@pytest.fixture
def example(monkeypatch):
    """The names of an example, without running it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / name), run_name="example")


@pytest.mark.parametrize(
    ("script", "chosen", "flags"),
    [
        ("calculator.py", "rollout=multi_turn (tools)", "--num_tasks 16 --num_heldout 4"),
        ("agent.py", "rollout=multi_turn (rollout_func)", "--num_tasks 16 --num_heldout 4"),
        pytest.param("mend.py", "rollout=multi_turn (rollout_func)", "", marks=BUBBLEWRAP),
        pytest.param("guessing_game.py", "rollout=multi_turn (HybridConfig.rollout)", "", marks=pytest.mark.slow),
    ],
)
def test_toys_run_to_their_report(tmp_path, script, chosen, flags):
    done = start(EXAMPLES / script, *SHORT.split(), *flags.split(), "--output_dir", tmp_path)
    assert chosen in done.stderr
    assert len(REPORT.findall(done.stdout)) == 1
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "reward.png").exists()


@pytest.mark.slow
def test_an_agent_trains_an_adapter_on_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = "--num_tasks 16 --num_heldout 4 --use_peft --lora_target_modules all-linear"
    command += [EXAMPLES / "agent.py", *SHORT.split(), *flags.split(), "--output_dir", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "weights=lora" in done.stderr
    assert done.stdout.count("Run folder:") == 2  # each process says it
    assert done.stderr.count("trlx_hybrid 0.1.0") == 1  # the first of two
    assert "trains by itself" not in done.stderr
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_tools_on_one_gpu(tmp_path):
    """The real-size script with a model, a dataset and a reward made here, and its tool in processes."""
    from datasets import Dataset
    from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "EXPRESSION"}}\n</tool_call>'
    turns = [call.replace("EXPRESSION", text) for text in ("2**3", "7*6", "(1+2)/0", "x", "-1")] + ["a plain answer"]
    tokenizer = chat_tokenizer(turns)
    tokenizer.save_pretrained(tmp_path / "model")
    chatty_model(tokenizer, turns).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"{i} or so"}], "solution": str(i)} for i in range(8)]
    Dataset.from_list(rows).to_json(tmp_path / "data" / "train.jsonl")
    source = (EXAMPLES / "grpo_tools_single_gpu.py").read_text()
    reward = "def accuracy_reward(completion_ids, **_):\n    return [float(len(ids)) for ids in completion_ids]\n"
    assert source.count("from trl.rewards import accuracy_reward\n") == 1
    (tmp_path / "script.py").write_text(source.replace("from trl.rewards import accuracy_reward\n", reward))
    flags = "--use_cpu --bf16 False --dtype float32 --max_steps 1 --per_device_train_batch_size 4 --num_generations 2"
    flags += " --report_to none --gradient_accumulation_steps 1 --lora_r 4 --max_completion_length 400"
    flags += " --temperature 0.3"
    flags += f" --model_name_or_path {tmp_path}/model --dataset_name {tmp_path}/data --output_dir {tmp_path}/out"
    flags += f' --plugin_options {{"trajectories":{{"record":"{tmp_path}/seen.jsonl"}}}}'
    options = '{"tools": "process", "max_processes": 1}'
    done = start(tmp_path / "script.py", *flags.split(), "--rollout_options", options)
    assert "weights=lora" in done.stderr
    assert "rollout=multi_turn (tools)" in done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert '"role":"tool"' in (tmp_path / "seen.jsonl").read_text()


def test_the_calculator_of_the_gpu_script(example):
    calculate = example("grpo_tools_single_gpu.py")["calculate"]
    assert calculate("(1 + 2) * -3 / 2") == "-4.5"
    for text in ("__import__('os')", "x + 1", "'a' * 9"):
        with pytest.raises(ValueError, match="cannot work out"):
            calculate(text)


def test_demonstrations_are_read_as_the_trainer_renders_them(example):
    """The toy tokenizer's long tokens must not reach over the place where the model begins to speak."""
    names = example("calculator.py")
    question = names["GYM"][0]["question"].replace(names["GYM"][0]["metadata"]["expression"], names["BLANK"])
    shapes = [names["conversation"](question, *[names["BLANK"]] * 3)]
    tokenizer = names["build_chat_tokenizer"](shapes, words=[*"0123456789 *"], tools=[names["calculate"]])
    from trl.chat_template_utils import get_training_chat_template

    given = {"tools": [names["calculate"]], "chat_template": get_training_chat_template(tokenizer), "tokenize": True}
    given["return_dict"] = False
    for seed in range(20):
        messages = names["demonstrate"](names["GYM"][seed], random.Random(seed))
        whole = tokenizer.apply_chat_template(messages, **given)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **given)
        assert whole[: len(prompt)] == prompt
        assert tokenizer.pad_token_id not in whole
        assert len(whole) < 80


def test_halving_always_wins(example):
    names = example("guessing_game.py")
    rng, openings = random.Random(0), []
    for _ in range(300):
        game = names["demonstrate"](rng)
        openings.append(game[1]["content"])
        assert sum(m["role"] == "assistant" for m in game) <= names["GUESSES"]
    assert 0.25 < openings.count("8") / len(openings) < 0.5
