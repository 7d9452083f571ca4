"""What `trlx-hybrid train RECIPE --forecast 80 --context N` says of activations: against recorded runs, and what it
refuses."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl.kernels import chunked_logprob
from trl.trainer import utils
from trlx_hybrid.commands.forecast import CUDA, TILE, forecast_of, gpus_of, prompts_of
from trlx_hybrid.commands.main import main
from trlx_hybrid.commands.train import read
from trlx_hybrid_training.micro_batches import RowLengths, fewest_tokens

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LONG = json.loads((RESULTS / "long_context-nvidia-h200.json").read_text())["settings"]
CAPACITY = json.loads((RESULTS / "capacity_training-nvidia-h100-80gb-hbm3.json").read_text())["settings"]
OF_TRL = json.loads((RESULTS / "history/capacity_training-nvidia-h100-80gb-hbm3-6fc301d.json").read_text())["settings"]
SHAPES = LONG["shapes"]
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SHORT = {"context": 4096, "sampled": 2048, "number": 4, "at_once": 1}
"""Rows of `benchmarks.capacity`, whose older result files do not have them."""
PADDED = {"packing": False, "adaptive_checkpointing": False, "lora_layers": False}
"""Options of the scoring with which a pass is TRL's own, as it was when those files were written."""


@pytest.fixture
def recipe(tmp_path):
    """Writes the recipe of a run of `benchmarks.capacity_run` on a GPU of 80 GiB, and returns its path."""

    def write(shape, rows, **more):
        kind = shape.get("model_type", "qwen2")
        config = {"max_position_embeddings": max(8192, rows["context"]), "model_type": kind, "dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURES[kind]]} | shape))
        settings = {
            "model_name_or_path": str(tmp_path),
            "dtype": "bfloat16",
            "bf16": True,
            "use_peft": True,
            "lora_r": 16,
            "lora_target_modules": ["all-linear"],
            "lora_dropout": 0.0,
            "dataset_name": "none",
            "reward_funcs": ["think_format_reward"],
            "engine": "vllm",
            "engine_options": json.dumps({"max_num_seqs": rows["number"]}),
            "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": rows["context"],
            "max_completion_length": rows["sampled"],
            "per_device_train_batch_size": rows["at_once"],
            "gradient_accumulation_steps": rows["number"] // rows["at_once"],
            "num_generations": rows["number"],
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(settings | more))  # JSON is YAML
        return tmp_path / "recipe.yaml"

    return write


# --- recorded runs ----------------------------------------------------------------------------------------------------


RECORDED = {
    "32B, 2 rows of 16,384": (LONG["runs"]["32b_16384"], SHAPES["32b"], None, {}),
    "32B, 4,096": (CAPACITY["runs"]["hybrid 32b"], SHAPES["32b"], SHORT, PADDED),
    "14B, 4,096": (OF_TRL["runs"]["trl 14b"], SHAPES["14b"], SHORT, PADDED),
}
"""Runs, shapes, rows where the run's file has none, and options of the scoring."""


def training_peaks(run):
    """GiB of the GPU that were used at most in the training half of each step."""
    return [float(gib) for stage in run["stages"] for gib in re.findall(r"step \d+ done, at most (\S+) GiB", stage)]


def forecast_peak(recipe, optimizer):
    """The forecast of the same, in GiB; `optimizer`: whether there is its state, as after the first step."""
    found = forecast_of(read(recipe, ["--forecast", "80"]), gpus_of("80"))
    held = sum(n for owner, n in found.prediction.phases["train"].items() if optimizer or owner != "optimizer")
    return (held + found.activations.device + CUDA) / 2**30


@pytest.mark.parametrize("case", RECORDED)
def test_the_peak_of_training_is_within_5_percent_of_a_recorded_run(recipe, case):
    """None of these was used to make the forecast, which counts what tensors take. So it is lower: torch keeps freed
    blocks, and an engine that sleeps keeps its CUDA graphs."""
    run, shape, rows, options = RECORDED[case]
    path = recipe(shape, rows or run["rows"], scoring="packed", scoring_options=json.dumps(options))
    for step, recorded in enumerate(training_peaks(run)):
        assert forecast_peak(path, optimizer=step > 0) == pytest.approx(recorded, rel=0.05)


def test_a_run_with_much_memory_left_takes_more_than_it_needs(recipe):
    """The step of 8B with rows of 131,072 tokens: torch keeps freed blocks as long as nobody asks for them."""
    run = LONG["runs"]["8b_131072"]
    needed = forecast_peak(recipe(SHAPES["8b"], run["rows"]), optimizer=False)
    assert 0.5 * training_peaks(run)[0] < needed < training_peaks(run)[0]


def test_the_head_computes_tiles_of_this_size():
    assert TILE == (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)


# --- what is printed --------------------------------------------------------------------------------------------------


def test_rows_of_128k_tokens_of_an_8b_model(recipe, capsys):
    rows = {"context": 131072, "sampled": 8192, "number": 2, "at_once": 2}
    path = recipe(SHAPES["8b"] | {"max_position_embeddings": 1 << 18}, rows, vllm_max_model_length=4096)
    assert main(["train", str(path), "--forecast", "80", "--context", "131072"]) == 0
    out = capsys.readouterr().out
    assert "room for 2 of 2 sequences of 131072 tokens" in out
    assert "for 2 rows of 131072 tokens, a prompt of 122880 computed once\n" in out
    assert "layers: 36 of 36 are recomputed, norms and MLPs in tiles, 36 inputs in host memory; logits of 4096" in out
    assert "host: 38.50 GiB of pinned memory on each rank\n" in out  # 36 × 139,265 tokens × 4,096 × 2, in whole chunks
    assert re.search(r"\nrows of 262144 tokens fit as it is, \d\d\.\d\d GiB of pinned host memory on each rank\n$", out)


def test_a_context_beyond_the_models_positions_is_refused(recipe, capsys):
    path = recipe(SHAPES["8b"], SHORT)
    assert main(["train", str(path), "--forecast", "80", "--context", "131072"]) == 1
    assert "context=131072 is more than the model's 8192 positions. Lower it, or give the" in capsys.readouterr().err


def test_a_context_needs_a_forecast(recipe, capsys):
    path = recipe(SHAPES["8b"], SHORT)
    assert main(["train", str(path), "--use_cpu", "--bf16", "False", "--context", "131072"]) == 1
    said = capsys.readouterr().err
    assert "context=131072 is a setting of a forecast: add --forecast 80" in said
    assert "vllm_max_model_length=131072" in said


DOUBLED = {
    "fewer rows": (
        2,
        {"scoring_options": '{"shared_prompts": false}'},
        40,
        65536,
        " fit with per_device_train_batch_size=1 and",
    ),
    "checkpointing": (1, {"gradient_checkpointing": False}, 80, 8192, " fit with gradient_checkpointing=True"),
    "nothing": (1, {}, 24, 32768, ": no single setting makes room; take a GPU with more memory"),
}
"""Rows of a micro-batch, settings, GiB of the GPU, the context, and the last line for twice as many tokens."""


@pytest.mark.parametrize("case", DOUBLED)
def test_the_last_line_names_what_makes_room_for_twice_as_many_tokens(recipe, capsys, case):
    at_once, more, gib, context, line = DOUBLED[case]
    rows = {"context": context, "sampled": 4096, "number": 2, "at_once": at_once}
    path = recipe(SHAPES["8b"] | {"max_position_embeddings": 1 << 18}, rows, **more)
    assert main(["train", str(path), "--forecast", str(gib), "--context", str(context)]) == 0
    assert f"\nrows of {2 * context} tokens{line}" in capsys.readouterr().out


def test_activations_that_do_not_fit_are_refused_with_the_settings_to_change(recipe, capsys):
    path = recipe(SHAPES["8b"], SHORT | {"at_once": 4}, gradient_checkpointing=False)
    assert main(["train", str(path), "--forecast", "40"]) == 1
    said = capsys.readouterr().err
    assert "4 rows of 4096 tokens take" in said
    assert "(all 36 keep their activations), and" in said
    assert "Lower per_device_train_batch_size or the length of rows, set gradient_checkpointing=True, or let" in said


def test_trls_own_scoring_forecasts_no_activations(recipe, capsys):
    path = recipe(SHAPES["8b"], SHORT, scoring="padded")
    assert main(["train", str(path), "--forecast", "80", "--context", "4096"]) == 0
    out = capsys.readouterr().out
    assert "of which the inputs of all layers take" in out
    assert out.endswith("rows of 8192 tokens: not known, scoring='padded' forecasts no activations here\n")


@pytest.mark.parametrize(
    ("rows", "generations", "more", "prompts"),
    [
        (8, 8, {}, 1),
        (8, 16, {}, 1),
        (16, 8, {}, 2),
        (8, 12, {}, 2),
        (6, 8, {}, 2),
        (8, 8, {"loss_type": "bnpo"}, 8),
        (8, 8, {"steps_per_generation": 24}, 8),
    ],
)
def test_rows_share_prompts_only_where_the_run_puts_them_together(rows, generations, more, prompts):
    given = {"num_generations": generations, "steps_per_generation": 12, "gradient_accumulation_steps": 12}
    args = SimpleNamespace(**given | {"loss_type": "dapo", "top_entropy_quantile": 1.0, "entropy_coef": 0.0} | more)
    assert prompts_of(args, rows) == prompts
    if prompts < rows:
        alike = [row // generations for row in range(12 * rows)]
        lengths = RowLengths([500] * len(alike), [at * generations for at in alike], [400] * len(alike))
        groups = fewest_tokens(lengths, 12)
        assert max(len({alike[row] for row in group}) for group in groups) <= prompts


def test_a_context_that_does_not_fit_is_told_what_makes_room_for_it(recipe, capsys):
    rows = {"context": 65536, "sampled": 4096, "number": 2, "at_once": 2}
    path = recipe(SHAPES["8b"] | {"max_position_embeddings": 1 << 18}, rows, gradient_checkpointing=False)
    assert main(["train", str(path), "--forecast", "80", "--context", "65536"]) == 1
    said = capsys.readouterr()
    assert "rows of 65536 tokens fit with gradient_checkpointing=True" in said.out
    assert "GiB are left for them" in said.err


def test_whole_gradients_of_shards_are_counted_while_micro_batches_accumulate(recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    full = {"use_peft": False, "fsdp": "full_shard", "fsdp_config": '{"version": 2}', "max_completion_length": 512}
    taken = {}
    for number in (4, 8):
        path = recipe(SHAPES["8b"], {"context": 2048, "sampled": 512, "number": number, "at_once": 4}, **full)
        given = read(path, ["--forecast", "8x80", "--num_generations", "4"])
        taken[number] = forecast_of(given, gpus_of("8x80")).activations.device
    policy = forecast_of(given, gpus_of("8x80")).loss.policy
    assert taken[8] - taken[4] == 2 * sum(p.numel() for p in policy.parameters)


def test_dropout_in_attention_is_not_forecast(recipe):
    """No kernel for ragged rows has it."""
    found = forecast_of(
        read(recipe(SHAPES["8b"] | {"attention_dropout": 0.1}, SHORT), ["--forecast", "80"]), gpus_of("80")
    )
    assert found.activations is None
