"""`trlx-hybrid reshard-plan`, as a user types it."""

import argparse
import json
import re

import pytest
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_reshard.planner.architectures import SHAPES
from trlx_hybrid_reshard.planner.cli import add_command


@pytest.fixture
def command(capsys):
    """Runs the command with the given arguments and returns what it printed."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())

    def run(line):
        options = parser.parse_args(["reshard-plan", *line.split()])
        assert options.run(options) == 0
        return capsys.readouterr().out

    return run


def test_the_json_has_every_rank_and_the_totals(command):
    found = json.loads(command("--model 7b --train fsdp=4 --rollout tp=2 --json"))
    assert [rank["rank"] for rank in found["per_rank"]] == [0, 1, 2, 3]
    worst = max(found["per_rank"], key=lambda rank: rank["receives_bytes"])
    # Rank 1 has none of its half of the column-parallel rows, a quarter of its half of the others and of the norms.
    row, norm = 28 * (3584 * 3584 + 3584 * 18944), (28 * 2 + 1) * 3584
    column = found["model_bytes"] // 2 - row - norm
    assert worst["receives_bytes"] == worst["floor_bytes"] == 2 * (column // 2 + row * 3 // 8 + norm * 3 // 4)
    assert {"sends_bytes", "local_copy_bytes", "zero_bytes"} <= worst.keys()
    assert found["peak_bytes"] <= 512 << 20
    assert 0 < found["plan_seconds"] < 5
    assert found["seconds"] == pytest.approx(worst["receives_bytes"] / 322e9)


def test_the_busiest_rank_is_broken_down_by_kind(command):
    found = json.loads(command("--model 30b-a3b --train fsdp=4 --rollout tp=2 --json"))
    busiest, kinds = found["per_rank"][found["busiest_rank"]], found["busiest_rank_kinds"]
    assert {kind["kind"] for kind in kinds} == {"vocab", "column", "row", "expert", "replicated"}
    for field in ("receives_bytes", "floor_bytes", "sends_bytes", "local_copy_bytes", "zero_bytes"):
        assert sum(kind[field] for kind in kinds) == busiest[field]
    assert busiest["receives_bytes"] == max(rank["receives_bytes"] for rank in found["per_rank"])


def test_the_layout_it_would_rather_have(command):
    found = json.loads(command("--model 7b --train fsdp=4 --rollout tp=2 --json"))["layouts"]
    assert [round(option["receives_bytes"] / 1e9, 2) for option in found] == [7.05, 5.71]
    found = json.loads(command("--model 7b --train fsdp=4 --rollout tp=4 --json"))["layouts"]
    assert [round(option["receives_bytes"] / 1e9, 2) for option in found] == [0.85, 0.00]
    assert set(found[1]["shard_dims"]) == {
        "model.layers.{}.self_attn.o_proj.weight",
        "model.layers.{}.mlp.down_proj.weight",
    }


@pytest.mark.parametrize(
    "line", ["--model 7b --train fsdp=4 --rollout tp=2", "--model 70b --train fsdp=16 --rollout tp=8"]
)
def test_what_the_run_refuses_is_not_advised(command, line):
    """A mesh out of order: `test_live.test_a_mesh_out_of_order_is_refused`."""
    text = command(line)
    assert "shard_placement_fn" in text
    assert "mesh" not in text.lower()


def test_the_text_names_minima_traffic_time_and_a_suggestion(command):
    text = command("--model 7b --train fsdp=4 --rollout tp=2")
    for part in ("7.05 GB", "minimum", "22.85 GB within nodes", "≈ 21.9 ms", "saves 1.34 GB", "Shard(1)"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 140


def test_the_picture_shows_who_sends_to_whom(command):
    text = command("--model 7b --train fsdp=4 --rollout tp=2")
    rows = text[text.index("traffic: row receives from column") :].splitlines()[2:6]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert "@@" in rows[0]
    assert rows[0].rstrip() != rows[1].rstrip()


def test_a_thousand_ranks_fit_on_a_screen(command):
    text = command("--model 70b --train fsdp=128 --rollout tp=8")
    assert "and 112 more" in text
    assert "each row and column 8 ranks" in text
    assert len(text.splitlines()) < 60


def test_bytes_are_told_apart_by_link(command):
    apart = json.loads(command("--model 7b --train fsdp=4 --rollout tp=2 --nodes 2 --json"))
    together = json.loads(command("--model 7b --train fsdp=4 --rollout tp=2 --nodes 1 --json"))
    assert together["inter_node_bytes"] == 0 < apart["inter_node_bytes"]
    assert apart["inter_node_bytes"] + apart["intra_node_bytes"] == together["intra_node_bytes"]
    assert apart["seconds"] > together["seconds"]


def test_a_slower_network_takes_longer(command):
    line = "--model 7b --train fsdp=4 --rollout tp=2 --nodes 2 --json --network "
    fast, slow = (json.loads(command(line + speed))["seconds"] for speed in ("50", "25"))
    assert slow == pytest.approx(2 * fast)
    text = command("--model 7b --train fsdp=16 --rollout tp=2 --network 25")
    assert "≈ 259.4 ms on the busiest link (NVLink 322 GB/s, network 25 GB/s per rank; " in text


def test_columns_stand_under_their_names(command):
    (head, first, *_) = command("--model 7b --train fsdp=4 --rollout tp=2").splitlines()[2:]
    assert len(head) == len(first)
    assert re.split("  +", first)[1:] == ["4.37 GB", "4.37 GB", "4.37 GB", "4.37 GB", "3.24 GB", "0 B", "0 B"]


def test_the_help_names_every_built_in_size(capsys):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["reshard-plan", "--help"])
    assert set(SHAPES) <= set(re.findall(r"[\w.-]+", capsys.readouterr().out))


def test_experts_may_be_dealt_out_over_replicas_that_fill_the_ranks(command):
    left_out, given = (
        json.loads(command(f"--model 30b-a3b --train fsdp=8 --rollout {dp}tp=2,ep=4 --json")) for dp in ("", "dp=4,")
    )
    assert left_out["target"] == given["target"] == "dp=4,tp=2,ep=4"
    assert left_out["per_rank"] == given["per_rank"]


def test_pipelines_and_the_way_back(command):
    there = json.loads(command("--model 70b --train fsdp=16 --rollout tp=4,pp=2 --json"))
    back = json.loads(command("--model 70b --train fsdp=16 --rollout tp=4,pp=2 --back --json"))
    assert there["source"] == back["target"] == "fsdp=16"
    assert sum(r["receives_bytes"] for r in there["per_rank"]) > sum(r["receives_bytes"] for r in back["per_rank"])


def test_a_config_file_or_its_folder(command, tmp_path):
    fields = {
        "model_type": "gemma",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    folder, file = (
        json.loads(command(f"--model {path} --train fsdp=2 --rollout tp=2 --json"))
        for path in (tmp_path, tmp_path / "config.json")
    )
    assert folder["per_rank"] == file["per_rank"]
    # The class ties Gemma's embeddings, the file need not say so: one vocabulary of 100 × 64.
    layer = 64 * 16 * (4 + 1 + 1 + 4) + 3 * 64 * 128 + 2 * 64
    assert folder["model_bytes"] == 2 * (100 * 64 + 2 * layer + 64)
    assert [rank["zero_bytes"] for rank in folder["per_rank"]] == [0, 28 * 64 * 2]  # padded to 128 rows


WRONG = [
    ("--model 7b --train fdsp=8 --rollout tp=4", r"--train fdsp=8: unknown key 'fdsp'. Did you mean 'fsdp'"),
    ("--model 7b --train fsdp=8 --rollout tp=8", r"tp=8 does not divide the 28 attention heads.*1, 2, 4, 7, 14, 28"),
    ("--model 7b --train fsdp=8 --rollout fsdp=2", r"--rollout fsdp=2: unknown key 'fsdp'"),
    ("--model 7b --train fsdp=x --rollout tp=4", r"--train fsdp=x: x is not a positive integer for fsdp. Write fsdp=4"),
    ("--model 7b --train fsdp=0 --rollout tp=4", r"--train fsdp=0: 0 is not a positive integer for fsdp"),
    ("--model 7b --train fsdp --rollout tp=4", r"--train fsdp: no size given for fsdp. Write fsdp=4."),
    ("--model 7b --train fsdp=8,fsdp=4 --rollout tp=4", r"fsdp is given twice"),
    ("--model 7b --train fsdp=6 --rollout tp=4", r"tp=4 uses 4 ranks per replica, which does not divide the 6 ranks"),
    ("--model 7b --train fsdp=8 --rollout tp=4,ep=4", r"--rollout tp=4,ep=4: 7b has no experts. Leave ep out."),
    ("--model 30b-a3b --train fsdp=8 --rollout tp=1,ep=3", r"ep=3 with tp=1, dp=8: ep must be tp, or tp times a"),
    ("--model 7b --train fsdp=8 --rollout tp=4,dp=4", r"fsdp=8 takes 8, dp=4,tp=4 takes 16"),
    ("--model 7b --train fsdp=8 --rollout tp=4 --nodes 3", r"--nodes 3 does not divide 8"),
    ("--model 7b --train fsdp=64 --rollout tp=1,pp=64", r"pp=64 is more than the 28 layers"),
    ("--model 7B5 --train fsdp=8 --rollout tp=4", r"no such file, folder or built-in size. Did you mean '7b'"),
    ("--model Qwen/Qwen3-8B --train fsdp=8 --rollout tp=4", r"Hub ids are not downloaded: give a local config.json"),
    ("--model 7b --train fsdp=8 --rollout tp=4 --network 0", r"--network 0: must be more than 0 GB/s"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[w[1][:30] for w in WRONG])
def test_errors_name_the_culprit_and_the_way_out(command, line, message):
    with pytest.raises(ConfigError, match=message):
        command(line)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a transformers config.* Give a model's config.json."),
        ("{}", "is not a transformers config: KeyError\\('model_type'\\)"),
        ('{"model_type": "qwen22"}', "transformers has no model_type 'qwen22'. Upgrade it"),
        ('{"model_type": "gpt2"}', "No parameter classes are known of model_type 'gpt2'"),
    ],
)
def test_a_file_that_is_no_config_is_named(command, tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        command(f"--model {tmp_path} --train fsdp=2 --rollout tp=2")
