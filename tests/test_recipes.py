"""`trlx-hybrid train`: every recipe as it stands, its forecast, a run of it on a tiny model, and what is refused."""

import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from trlx_hybrid.commands.forecast import gpus_of
from trlx_hybrid.commands.main import main
from trlx_hybrid.commands.train import function, read, train
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.processes import free_port

from benchmarks.rollout import SCALES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
TIED = {"vocab_size": 151936, "tie_word_embeddings": True}
SEVEN = QWEN2 | SCALES["7b"].config
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
OWNERS = ("policy", "gradients", "optimizer")  # whose bytes are the same on any device
LEAVES = re.compile(r"engine weights +\S+ +\S+ +away")
SMALL = (
    "--use_cpu --bf16 False --dtype float32 --max_steps 2 --save_strategy no --report_to none --temperature 0.7 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_generations 2 "
    "--max_completion_length 160 --vllm_max_model_length 1600"
)
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
        flags += SMALL.split()
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
def test_a_recipe_says_where_it_was_run(recipe):
    """In its head as on the page; one that claims a GPU is a script of the page of whole runs."""
    (seen,) = re.findall(r"^# Seen: +(.*)$", recipe.read_text(), re.MULTILINE)
    (row,) = re.findall(rf"^\| `{recipe.stem}` .* \| ([^|]+) \|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    assert ("not yet on a GPU" in seen) == (row == "not yet")
    if row != "not yet":
        whole = (ROOT / "tests/whole_runs/test_one_gpu.py").read_text()
        (case,) = re.findall(rf'^def test_(\w+)\(.*\):\n(?: .*\n|\n(?= ))*? .*"{recipe.name}"', whole, re.MULTILINE)
        assert f"`{case}`" in (ROOT / "docs/tested.md").read_text()


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


def test_a_forecast_where_trl_generates_has_no_engine(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))
    flags = ["--engine", "transformers", "--forecast", "80", "--model_name_or_path", str(tmp_path)]
    assert main(["train", str(FOLDER / "math-80gb.yaml"), *flags]) == 0
    out = capsys.readouterr().out
    assert "policy             14.49    14.49    14.49\n" in out
    assert "engine weights" not in out
    assert "KV cache" not in out


def test_a_forecast_leaves_out_engines_that_have_gpus_of_their_own(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))
    flags = ["--engine", "remote", "--forecast", "80", "--model_name_or_path", str(tmp_path)]
    assert main(["train", str(FOLDER / "math-80gb.yaml"), *flags]) == 0
    out = capsys.readouterr().out
    assert "KV cache" not in out
    assert "\nnot counted: the engines, which have GPUs of their own\n" in out


def test_a_forecast_without_room_for_one_sequence_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))
    flags = ["--forecast", "16", "--model_name_or_path", str(tmp_path)]
    assert main(["train", str(FOLDER / "math-24gb.yaml"), *flags]) == 1
    assert "one sequence of 1536 tokens takes 0.08. Lower vllm_max_model_length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm", "dynamic_samplin"], "Did you mean 'dynamic_sampling'"),
        (["--engine_options", '{"max_num_seqs": "64"}'], "max_num_seqs is int, got '64'"),
        (["--plugin_options", '{"trainig": {}}'], "which is not loaded. Did you mean 'training'"),
        (["--vllm_tensor_parallel_size", "2"], "An engine takes 2 GPUs, which do not divide the 1 of --forecast."),
    ],
)
def test_a_forecast_refuses_what_the_run_would(tmp_path, capsys, flags, message):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))
    given = ["--forecast", "80", "--model_name_or_path", str(tmp_path), *flags]
    assert main(["train", str(FOLDER / "math-80gb.yaml"), *given]) == 1
    assert message in capsys.readouterr().err


def test_a_flag_is_written_out(tmp_path, capsys):
    flags = ["--fore", "24", "--model_name_or_path", str(tmp_path)]
    assert main(["train", str(FOLDER / "math-24gb.yaml"), *flags]) == 1
    assert "Did you mean '--forecast'" in capsys.readouterr().err


def test_a_forecast_counts_batches_over_all_ranks_and_says_what_it_does_not_count(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))
    few = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1", "--num_generations", "8"]
    words = ["train", str(FOLDER / "math-8x80gb.yaml"), "--model_name_or_path", str(tmp_path), *few]
    assert main([*words, "--forecast", "8x80", "--beta", "0.04"]) == 0
    assert "\nnot counted: the reference model of beta\n" in capsys.readouterr().out
    assert main([*words, "--forecast", "80"]) == 1
    assert "must be divisible by num_generations" in capsys.readouterr().err
    words = ["train", str(FOLDER / "math-24gb.yaml"), "--model_name_or_path", str(tmp_path), "--load_in_8bit"]
    assert main([*words, "--forecast", "24"]) == 1
    assert "a base in 8 bits is served by no engine" in capsys.readouterr().err


def test_a_forecast_knows_a_checkpoint_that_is_in_4_bits_already(tmp_path, capsys):
    """And the layers that it was told to leave as they are."""

    def forecast(*flags, **quantised):
        (tmp_path / "config.json").write_text(json.dumps(SEVEN | quantised))
        words = ["train", str(FOLDER / "math-24gb.yaml"), "--forecast", "40", "--model_name_or_path", str(tmp_path)]
        code = main([*words, *flags])
        return code, *capsys.readouterr()

    def policy(*flags, **quantised):
        code, out, _ = forecast(*flags, **quantised)
        assert code == 0
        return float(re.search(r"^policy +(\S+)", out, re.MULTILINE)[1])

    told = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    whole = policy(quantization_config=told)
    assert whole == policy("--load_in_4bit", "--use_bnb_nested_quant")
    kept = policy(quantization_config=told | {"llm_int8_skip_modules": ["lm_head", "model.layers.3.mlp"]})
    assert kept - whole == pytest.approx(3 * 3584 * 18944 * (2 - 0.5 - 1 / 64) / 2**30, abs=0.02)
    code, _, err = forecast(quantization_config={"quant_method": "gptq", "bits": 4})
    assert code == 1
    assert "is quantised (gptq), which --forecast knows in 4 bits of bitsandbytes only" in err


def test_the_last_number_of_the_last_message_is_the_answer():
    last_number = function("gsm8k.py:last_number", FOLDER, "reward_funcs")
    said = ["So 3 + 4 = 7.", "It costs $1,080.", "\\boxed{-2.50}", "7 or 8", "", None]
    asked = {"role": "assistant", "content": "7", "tool_calls": []}
    completions = [[asked, {"role": "assistant", "content": text}] for text in said]
    assert last_number(completions, ["7", "1080", "-2.5", "7", "7", "7"]) == [1, 1, 1, 0, 0, 0]


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


@pytest.fixture
def published(tmp_path):
    """Write what a rehearsal reads of a model: a config with the sizes of the real one, and a tokenizer; no weights."""

    def write(name, turns):
        chat_tokenizer(turns).save_pretrained(tmp_path / "published")
        (tmp_path / "published" / "config.json").write_text(json.dumps(CONFIGS[name]))
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
        flags = ["--model_name_or_path", str(tmp_path / "published"), "--dataset_name", str(tmp_path / "data")]
        return [*flags, "--dataset_config", "default"]

    return write


@pytest.mark.parametrize(
    ("recipe", "name", "further"),
    [
        ("math-24gb", "Qwen/Qwen2.5-1.5B-Instruct", ["--reward_funcs", "gsm8k.py:last_number", "--max_steps", "1"]),
        ("math-8x80gb", "Qwen/Qwen2.5-7B-Instruct", ["--reward_funcs", "gsm8k.py:last_number"]),
        ("tools-24gb", "Qwen/Qwen3-4B-Instruct-2507", []),
    ],
)
def test_a_recipe_is_rehearsed_on_a_laptop_with_one_flag(
    recipe, name, further, published, tmp_path, monkeypatch, started_once, capfd
):
    """With the sizes that GPUs have: two steps of a small model, and the user's own flags win."""
    flags = published(name, ["It is 3"])
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(FOLDER / f"{recipe}.yaml"), *flags, "--rehearse", *further]) == 0
    said = capfd.readouterr().out
    assert f"rehearsed: {1 if recipe == 'math-24gb' else 2} steps on a CPU, with a qwen" in said
    assert f"million random weights in the place of {tmp_path}/published." in said
    assert not (tmp_path / "runs").exists()


def test_a_model_with_pictures_is_not_rehearsed(published, capsys):
    flags = published("Qwen/Qwen2.5-VL-3B-Instruct", ["It is 3"])
    flags += ["--reward_funcs", "gsm8k.py:last_number", "--rehearse"]
    assert main(["train", str(FOLDER / "vision-24gb.yaml"), *flags]) == 1
    assert "--rehearse makes no small qwen2_5_vl" in capsys.readouterr().err


RUNS = {
    "math-24gb": (["It is 3", "It is 4"], GSM8K, ["--reward_funcs", "gsm8k.py:last_number"]),
    "math-7b-24gb": (["It is 3", "It is 4"], GSM8K, ["--reward_funcs", "gsm8k.py:last_number"]),
    "math-80gb": (["It is 3", "It is 4"], GSM8K, ["--reward_funcs", "gsm8k.py:last_number", "--trainer", "rloo"]),
    "tools-24gb": ([CALL, "It is 3", "It is 4"], GSM8K, []),
    "game-24gb": (
        [" 1", " 2", " 3", " 4"],
        None,
        ["--environment_options", '{"highest": 5, "guesses": 3}', "--temperature", "0.3"],
    ),
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
    (folder := tmp_path / "site" / f"{declared['name'].replace('-', '_')}-{declared['version']}.dist-info").mkdir(
        parents=True
    )
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n"
    )
    offered = declared["entry-points"]["trlx_hybrid"].items()
    (folder / "entry_points.txt").write_text("[trlx_hybrid]\n" + "".join(f"{k} = {v}\n" for k, v in offered))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.syspath_prepend(str(project / "src"))


def trained(recipe, flags):
    """The lines of its log, and those of its header."""
    given = read(FOLDER / f"{recipe}.yaml", flags)
    if given.model.load_in_4bit:
        pytest.importorskip("bitsandbytes", reason="in `make test-4bit`: TRL and PEFT import it where it is there")
    trainer = train(given)
    trainer.session.close()
    assert trainer.state.global_step == 2
    return [line for line in trainer.state.log_history if "reward" in line], trainer.session.header_lines


@pytest.mark.parametrize(
    "further",
    [[], ["--use_peft", "False"], ["--load_in_4bit"], ["--load_in_4bit", "--use_bnb_nested_quant"]],
    ids=["adapter", "all weights", "4 bits", "nested"],
)
def test_a_run_holds_what_was_forecast(stand_ins, started_once, capsys, further):
    flags = [*stand_ins(["It is 3", "It is 4"], GSM8K), "--reward_funcs", "gsm8k.py:last_number", *further]
    assert main(["train", str(FOLDER / "math-24gb.yaml"), *flags, "--forecast", "24"]) == 0
    forecast = capsys.readouterr().out.splitlines()
    _, header = trained("math-24gb", flags)
    expected = [line for line in forecast if line.startswith(OWNERS)]
    assert len(expected) == 3
    assert [line for line in header if line.startswith(OWNERS)] == expected
    lines = [any(map(LEAVES.match, told)) for told in (forecast, header)]
    assert lines == ["--load_in_4bit" in further] * 2


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_trains_a_tiny_model(recipe, stand_ins, guess, started_once):
    turns, rows, further = RUNS[recipe]
    lines, _ = trained(recipe, [*stand_ins(turns, rows), *further])
    assert len(lines) == 2
    assert max(line["reward"] for line in lines) > 0
    if recipe == "tools-24gb":
        assert max(line["tools/call_frequency"] for line in lines) > 0
        assert max(line["tools/failure_frequency"] for line in lines) == 0
    if recipe == "game-24gb":
        assert max(line["hybrid/turns/mean"] for line in lines) > 1


def test_pictures(stand_ins, tmp_path, started_once):
    """In `make test-vision`, which has the torchvision that processors of images need."""
    pytest.importorskip("torchvision", reason="the processors of vision-language models need torchvision")
    from datasets import Dataset

    from tests.support.vision import chatty_vision_model, picture

    turns = ["<think>\nthree\n</think>\nIt is 3", "It is 4"]
    flags = stand_ins(turns)
    model, processor = chatty_vision_model(turns)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    pictures = [picture("qwen3_vl", squares=3, seed=seed) for seed in range(8)]
    rows = [
        {"image": image, "problem": "How many squares?", "solution": "3", "original_question": ""} for image in pictures
    ]
    (tmp_path / "data").mkdir()
    Dataset.from_list(rows).to_parquet(tmp_path / "data" / "train.parquet")
    flags += ["--dataset_name", str(tmp_path / "data"), "--reward_funcs", "think_format_reward"]
    assert max(line["reward"] for line in trained("vision-24gb", flags)[0]) > 0


@pytest.mark.slow
def test_two_processes_shard_the_model_as_the_recipe_says(stand_ins, tmp_path, capsys):
    flags = [*stand_ins(["It is 3", "It is 4"], GSM8K), "--reward_funcs", "gsm8k.py:last_number"]
    assert main(["train", str(FOLDER / "math-8x80gb.yaml"), *flags, "--forecast", "2x80"]) == 0
    held = [line for line in capsys.readouterr().out.splitlines() if line.startswith(OWNERS)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]  # accelerate starts one on CPUs
    script = "from tests.support.fsdp import use_fsdp_on_cpu\nuse_fsdp_on_cpu()\n"
    (tmp_path / "train.py").write_text(
        script + "from trlx_hybrid.commands.main import main\nraise SystemExit(main())\n"
    )
    command += ["--master_port", str(free_port()), "train.py", "train", str(FOLDER / "math-8x80gb.yaml"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "weights=reshard (auto; not alias: " in done.stderr
    assert len(held) == 3
    assert set(held) <= set(done.stderr.splitlines())
    assert (tmp_path / "out" / "model.safetensors").exists()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path, capsys):
    """What `trlx-hybrid train` says of a recipe with these lines and flags, for which there is no model to load."""

    def tell(text, *flags):
        (tmp_path / "mine.yaml").write_text(text)
        assert main(["train", str(tmp_path / "mine.yaml"), "--use_cpu", *flags]) == 1
        return capsys.readouterr().err

    return tell


GOOD = "model_name_or_path: nowhere/nothing\ndataset_name: nowhere/at-all\nreward_funcs: [think_format_reward]\n"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (GOOD + "learning_rat: 1\n", [], "sets 'learning_rat', which nothing reads. Did you mean 'learning_rate'?"),
        (GOOD, ["--max_steps", "3", "--lerning_rate=1"], "Nothing reads the argument '--lerning_rate'."),
        (
            GOOD,
            ["--num_generations", "7", "--lerning_rate=1"],
            "Nothing reads the argument '--lerning_rate'. Did",
        ),
        (GOOD, ["--lerning_rate=1"], "Did you mean '--learning_rate'?"),
        ("- a\n- b\n", [], "must have lines `setting: value`, and is a list."),
        ("a: [\n", [], "is not YAML: "),
        (GOOD + "trainer: grop\n", [], "trainer is 'grop'. Did you mean 'grpo'? It takes grpo and rloo."),
        (GOOD, ["--num_generations", "7"], "TRL refuses the settings of "),
        (GOOD.replace("model_name", "# model_name"), [], "model_name_or_path is not set"),
        (GOOD, ["--reward_funcs", "think_format"], "no function 'think_format'. Did you mean 'think_format_reward'?"),
        (GOOD, ["--reward_funcs", "accuracy_reward"], "pip install 'trl[math-verify]'"),
        (GOOD, ["--fsdp", "full_shard"], "accelerate launch --num_processes 8 --module trlx_hybrid train RECIPE"),
        (GOOD, ["--reward_funcs", "rewards.py:digits"], "no file rewards.py in"),
        (GOOD, ["--reward_funcs", "reward.py:digit"], "reward.py has no function 'digit'. Did you mean 'digits'?"),
        (GOOD, ["--tools", "no_such_package.tools:search"], "tools: no module 'no_such_package'. Install it"),
        (GOOD, ["--tools", "reward.py:SIZE"], "has a int and no function 'SIZE'"),
        (GOOD, ["--tools", "reward.py:digits", "--trainer", "rloo"], "trainer='rloo' has none in TRL"),
        (GOOD.replace("reward_funcs", "# reward_funcs"), [], "reward_funcs is not set, and there is no environment"),
        (GOOD.replace("dataset_name", "# dataset_name"), [], "dataset_name is not set, and there is no environment"),
        (GOOD, [], "dataset_name: 'nowhere/at-all', split 'train', cannot be loaded: "),
        (GOOD, ["--dataset_name", "rows"], "has no column 'prompt', but question. Set `prepare`"),
        (GOOD, ["--forecast", "24", "--reward_funcs", "think_format"], "no function 'think_format'. Did you mean"),
        (GOOD, ["--forecast", "24"], "the config of 'nowhere/nothing' cannot be read"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(told, tmp_path, monkeypatch, text, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("SIZE = 3\n\n\ndef digits(completions, **columns): ...\n")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"question": "1 + 1"}\n')
    assert message in told(text, *flags)


def test_a_model_in_4_bits_without_bitsandbytes_is_a_line(told, monkeypatch):
    stock = importlib.util.find_spec

    def without(name, *others):
        return None if name == "bitsandbytes" else stock(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    said = told(GOOD, "--load_in_4bit")
    assert "load_in_4bit needs the package bitsandbytes, which is not installed: pip install bitsandbytes" in said


def test_a_recipe_that_is_not_there(capsys):
    assert main(["train", str(FOLDER / "math-25gb.yaml")]) == 1
    assert (
        "math-25gb.yaml cannot be read: No such file or directory. Did you mean 'math-24gb.yaml'?"
        in capsys.readouterr().err
    )


def test_functions_are_found_beside_the_recipe_in_the_working_directory_and_in_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def here(): ...\n")
    assert function("mine.py:here", FOLDER, "tools") is function("mine.py:here", FOLDER, "tools")
    assert function("gsm8k.py:last_number", FOLDER, "reward_funcs").__name__ == "last_number"
    assert function("trl.rewards.think_format_reward", FOLDER, "reward_funcs").__name__ == "think_format_reward"
    assert function("os.path:join", FOLDER, "tools") is os.path.join
    (tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):  # its own mistake, with its traceback
        function("broken.py:here", FOLDER, "tools")
