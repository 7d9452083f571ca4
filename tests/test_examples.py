import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import Script

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_from_trl_to_hybrid_changes_at_most_three_lines():
    command = ["git", "diff", "--no-index", "--unified=0", EXAMPLES / "grpo_trl.py", EXAMPLES / "grpo.py"]
    diff = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    changed = [line for line in diff if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    assert 1 <= len(changed) <= 3
    assert "+from trlx_hybrid import GRPOTrainer" in changed


def test_the_example_trains_and_saves_from_the_command_line(tmp_path):
    """What a user types, on a model and data made here: flags of TRL and of HybridConfig's environment, one process."""
    from datasets import Dataset
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    tiny_model().save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(8)]
    (tmp_path / "data").mkdir()
    Dataset.from_list(rows).to_json(tmp_path / "data" / "train.jsonl")
    script = (EXAMPLES / "grpo.py").read_text().replace("accuracy_reward", "length_reward")
    script = script.replace(
        "from trl.rewards import length_reward",
        "def length_reward(completion_ids, **_): return [len(c) for c in completion_ids]",
    )
    (tmp_path / "grpo.py").write_text(script)
    flags = "--use_cpu --bf16 False --max_steps 2 --per_device_train_batch_size 4 --num_generations 2 --report_to none"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", str(tmp_path / "grpo.py"), *flags.split()]
    command += ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    command += ["--output_dir", str(tmp_path / "out"), "--use_vllm", "--vllm_mode", "colocate", "--dtype", "float32"]
    command += ["--max_completion_length", "8", "--vllm_max_model_length", "32", "--use_peft", "--lora_r", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "engine=vllm (use_vllm=True) · weights=lora (auto; not alias: the policy has adapters" in done.stderr
    assert "· rollout=single_turn (default)" in done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_the_table_of_the_quickstart_marks_right_answers(tmp_path, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import quickstart

    tasks = [{"metadata": {"word": word}, "answer": word[::-1]} for word in ("lamp", "tree")]
    monkeypatch.setattr(quickstart, "is_right", lambda task, answer: answer == task["answer"])
    quickstart.report(tmp_path, ["pmla", "eert"], ["pmal", "eetr"], tasks, [0.5, 0.5])
    _, after = capsys.readouterr().out.split("after GRPO\n")
    assert [line.split() for line in after.splitlines()[:4]] == [
        ["accuracy", "50.0%", "50.0%"],
        ["lamp", "pmla", "pmal", "✓"],
        ["tree", "eert", "✓", "eetr"],
        ["✓", "right"],
    ]


def test_squares_are_counted(tmp_path):
    """In `make test-vision`, from the command line, with fewer steps: the accuracy on new pictures rises."""
    pytest.importorskip("torchvision", reason="processors of pictures need torchvision")
    command = [sys.executable, str(EXAMPLES / "count_shapes.py"), "--output_dir", str(tmp_path)]
    command += ["--max_steps", "12", "--demonstration_steps", "200"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (float(share) for share in re.findall(r"([\d.]+)%", done.stdout)[-2:])
    assert after > before + 20
    assert "engine=vllm (use_vllm=True)" in done.stderr
    assert {"model.safetensors", "reward.png"} <= {path.name for path in tmp_path.iterdir()}


AS_A_KERNEL = """
import asyncio, io, json, os, sys

class Stream(io.StringIO):
    def fileno(self):
        raise io.UnsupportedOperation("fileno")

async def execute(cells):  # with an event loop that runs, and streams that are no files
    names = {"__name__": "__main__"}
    shown, sys.stdout = sys.stdout, Stream()
    for cell in cells:
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
    print(sys.stdout.getvalue(), file=shown)

os.chdir(sys.argv[2])
cells = json.load(open(sys.argv[1]))["cells"]
asyncio.run(execute([cell for cell in cells if cell["cell_type"] == "code"]))
"""


def test_the_notebook_learns_and_is_committed_without_outputs(tmp_path):
    notebook = EXAMPLES / "first_run.ipynb"
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    kernel = tmp_path / "kernel.py"
    kernel.write_text(AS_A_KERNEL)
    done = Script(kernel, notebook, tmp_path).wait(400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "engine=vllm (HybridConfig.engine) · weights=alias" in done.stderr
    rewards = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert rewards[0] < 0.3 < 0.6 < rewards[-1]
