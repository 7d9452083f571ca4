"""The examples of the hybrid engine, as a user starts them, on a model and data made here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import Script, free_port

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TRAIN = "--use_cpu --bf16 False --max_steps 2 --per_device_train_batch_size 4 --num_generations 2 --report_to none"
SHORT = "--max_completion_length 8 --vllm_max_model_length 32 --gradient_accumulation_steps 1"


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with a model and a dataset."""
    from datasets import Dataset
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    folder = tmp_path_factory.mktemp("material")
    tiny_model().save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(8)]
    Dataset.from_list(rows).to_json(folder / "data" / "train.jsonl")
    return folder


def start(*command, launcher=()):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if launcher:
        arguments = [sys.executable, *launcher, *map(str, command)]
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=400)
    else:
        done = Script(*command, environment=environment).wait(400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def grpo(material, tmp_path, script, *flags):
    """Run an example with a reward that needs no further package; what it wrote to stderr."""
    source = (EXAMPLES / script).read_text()
    function = "def accuracy_reward(completion_ids, **_):\n    return [float(len(ids)) for ids in completion_ids]\n"
    assert source.count("from trl.rewards import accuracy_reward\n") == 1
    (tmp_path / script).write_text(source.replace("from trl.rewards import accuracy_reward\n", function))
    inputs = ["--model_name_or_path", material / "model", "--dataset_name", material / "data"]
    done = start(tmp_path / script, *TRAIN.split(), *SHORT.split(), *inputs, "--output_dir", tmp_path / "out", *flags)
    return done.stderr


def test_lora(material, tmp_path):
    log = grpo(material, tmp_path, "grpo_lora_single_gpu.py", "--dtype", "float32", "--lora_r", "4")
    assert "engine=vllm (HybridConfig.engine) · weights=lora (auto; not alias: the policy has adapters" in log
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["--engine_options", '{"dtype": "bfloat16"}'], "copy (auto; not alias: the policy is in float32"),
        (["--dtype", "bfloat16"], "alias (auto)"),
    ],
    ids=["copy", "alias"],
)
def test_full(material, tmp_path, flags, path):
    log = grpo(material, tmp_path, "grpo_full_single_gpu.py", *flags)
    assert f"engine=vllm (HybridConfig.engine) · weights={path}" in log
    assert (tmp_path / "out" / "model.safetensors").exists()


LAUNCHERS = {
    "python": "",
    "torchrun": "-m torch.distributed.run --nproc_per_node 2 --master_port PORT",
    # With `--cpu` it would start one process whatever `--num_processes` says; with the GPU's launcher it starts two.
    "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port PORT",
}
LOOP = "--steps 3 --num_generations 4 --max_tokens 12 --learning_rate 3e-3"


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("torchrun", "accelerate")]


@pytest.mark.parametrize("launcher", ["python", *SLOW])
def test_custom_loop(material, tmp_path, launcher):
    words = LAUNCHERS[launcher].replace("PORT", str(free_port())).split()
    folders = ["--model_name_or_path", material / "model", "--output_dir", tmp_path / "out"]
    done = start(EXAMPLES / "custom_loop.py", *folders, *LOOP.split(), launcher=words)
    assert done.stderr.count("trlx_hybrid 0.1.0 · plugins:") == 1
    assert len(re.findall(r"^step \d: reward \d+\.\d{3}$", done.stdout, re.MULTILINE)) == 3  # once, not once per rank
    assert (tmp_path / "out" / "model.safetensors").exists()
