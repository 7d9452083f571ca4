"""`trlx-hybrid train`: every recipe as it stands, its forecast, a run of it on a tiny model, and what is refused."""

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from trlx_hybrid.cli import main
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.forecast import gpus_of
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.train import function, read, train

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
TIED = {"vocab_size": 151936, "tie_word_embeddings": True}
SEVEN = QWEN2 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2
    | TIED
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2
    | TIED
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "Qwen/Qwen2.5-7B-Instruct": SEVEN,
    "Qwen/Qwen2.5-Coder-7B-Instruct": SEVEN,
    "Qwen/Qwen3-4B-Instruct-2507": TIED
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": TIED
        | {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}
"""What the published config.json of each model says about sizes."""

QUESTION = "Tom has 2 eggs and buys 1. How many has he?"
GSM8K = [{"question": f"{i}. {QUESTION}", "answer": "2 + 1 = <<2+1=3>>3\n#### 3"} for i in range(8)]
MBPP = [
    {
        "task_id": i,
        "text": f"{i}. Write a function that adds one.",
        "code": "def f(x):\n    return x + 1",
        "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    for i in range(8)
]
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 1"}}\n</tool_call>'
PROGRAMS = ["```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return 2\n```"]


@pytest.fixture(autouse=True)
def left_as_it_was():
    """A run sets variables of launchers, which the next accelerator would believe."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()


@pytest.fixture
def stand_ins(tmp_path):
    """Writes a tiny model that speaks `turns`, and rows, and returns the flags that name them."""

    def write(turns, rows=None):
        tokenizer = chat_tokenizer(turns)
        chatty_model(tokenizer, turns).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        flags = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
        flags += "--use_cpu --bf16 False --dtype float32 --max_steps 2 --save_strategy no --report_to none".split()
        flags += "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_generations 2".split()
        flags += "--max_completion_length 160 --vllm_max_model_length 1600 --temperature 0.7".split()
        if rows is not None:
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            flags += ["--dataset_name", str(tmp_path / "data"), "--dataset_config", "default"]
        return flags

    return write


# --- what the files say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_says_what_todays_configs_read_and_names_functions_that_are_there(recipe):
    given = read(recipe, ["--use_cpu"])
    named = [given.recipe.prepare, *(given.recipe.reward_funcs or ()), *(given.recipe.tools or ())]
    for name in named:
        if name is not None and ":" in name:
            assert callable(function(name, given.folder, "recipe"))
    assert given.training.output_dir == f"runs/{recipe.stem}"
    assert given.model.model_name_or_path in CONFIGS
    assert given.training.generation_batch_size % given.training.num_generations == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_the_forecast_in_the_comment_is_what_the_command_prints(recipe, tmp_path, capsys):
    text = recipe.read_text()
    command, shown = re.search(r"^#     \$ trlx-hybrid (.*)\n((?:#     .*\n)+)", text, re.MULTILINE).groups()
    (name,) = re.findall(r"^model_name_or_path: (.*)$", text, re.MULTILINE)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    words = [str(ROOT / word) if word.endswith(".yaml") else word for word in command.split()]
    assert main([*words, "--model_name_or_path", str(tmp_path)]) == 0
    assert capsys.readouterr().out == textwrap.dedent(shown.replace("#", " "))
    gib, of = re.search(r"peak (\S+) GiB", shown)[1], gpus_of(words[-1])
    assert float(gib) < of.bytes / 2**30


def test_a_run_that_cannot_fit_is_refused_with_the_setting_to_change(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))
    words = ["train", str(FOLDER / "math-8gb.yaml"), "--forecast", "8", "--model_name_or_path", str(tmp_path)]
    assert main(words) == 1
    assert "The largest owner is policy" in capsys.readouterr().err
    assert main([*words[:3], "8gb", *words[4:]]) == 1
    assert "--forecast 8gb: write the GiB of a GPU, as 24, or of several, as 8x80." in capsys.readouterr().err


# --- runs -------------------------------------------------------------------------------------------------------------


def test_mathematics_from_the_command_line(stand_ins, tmp_path):
    """In a process of its own, as a user starts it. math-verify is not installed here, so another function judges."""
    flags = stand_ins(["It is 3", "It is 4"], GSM8K)
    command = [sys.executable, "-m", "trlx_hybrid", "train", str(FOLDER / "math-8gb.yaml"), *flags]
    command += ["--reward_funcs", "gsm8k.py:last_number", "--logging_steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "engine=vllm (HybridConfig.engine) · weights=lora (auto; not alias: the policy has adapters" in done.stderr
    assert "scoring=packed (HybridConfig.scoring)" in done.stderr
    rewards = [float(reward) for reward in re.findall(r"'rewards/last_number/mean': '?([\d.]+)", done.stdout)]
    assert len(rewards) == 2
    assert max(rewards) > 0
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


RUNS = {
    "math-24gb": (["It is 3", "It is 4"], GSM8K, ["--reward_funcs", "gsm8k.py:last_number"]),
    "math-80gb": (["It is 3", "It is 4"], GSM8K, ["--reward_funcs", "gsm8k.py:last_number", "--trainer", "rloo"]),
    "tools-24gb": ([CALL, "It is 3", "It is 4"], GSM8K, []),
    "game-24gb": (["1", "2", "3"], None, ["--environment_options", '{"highest": 5, "guesses": 3}']),
    "code-80gb": (PROGRAMS, MBPP, []),
}
"""Turns of the model, rows, and further flags."""


def test_every_recipe_is_run():
    apart = {"math-8gb", "math-8x80gb", "vision-24gb"}  # in tests of their own
    assert apart | set(RUNS) == {recipe.stem for recipe in RECIPES}


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """The game's distribution, as an installed one is found."""
    project = ROOT / "examples" / "environment_guess"
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    (folder := tmp_path / "site" / f"{declared['name'].replace('-', '_')}-{declared['version']}.dist-info").mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    offered = declared["entry-points"]["trlx_hybrid"].items()
    (folder / "entry_points.txt").write_text("[trlx_hybrid]\n" + "".join(f"{k} = {v}\n" for k, v in offered))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.syspath_prepend(str(project / "src"))


def trained(recipe, flags):
    """The lines of its log."""
    trainer = train(read(FOLDER / f"{recipe}.yaml", flags))
    trainer.session.close()
    assert trainer.state.global_step == 2
    return [line for line in trainer.state.log_history if "reward" in line]


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_trains_a_tiny_model(recipe, stand_ins, guess, started_once):
    turns, rows, further = RUNS[recipe]
    lines = trained(recipe, [*stand_ins(turns, rows), *further])
    assert len(lines) == 2
    assert max(line["reward"] for line in lines) > 0
    if recipe == "tools-24gb":
        assert max(line["tools/call_frequency"] for line in lines) > 0
        assert max(line["tools/failure_frequency"] for line in lines) == 0
    if recipe == "game-24gb":
        assert max(line["hybrid/turns/mean"] for line in lines) > 1
