"""A custom loop with its layouts named: checked against what is live, and resharded at every rollout."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import ends


def ran(script, folder, count, *arguments):
    """(reports, ends) of the ranks of a script."""
    ended = ends(script, folder, count, *arguments)
    assert not any(end.returncode for end in ended), "\n".join(end.stderr[-3000:] for end in ended)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)], ended


def looped(folder, tp, pp, dtype):
    """(reports, stderr) of the ranks of one engine."""
    reports, ended = ran("looping.py", folder, tp * pp, tp, pp, dtype)
    return reports, [end.stderr for end in ended]


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["tp=2", "tp=2, pp=2"])
def seen(request, tmp_path_factory):
    return looped(tmp_path_factory.mktemp("looping"), *request.param, "float32")


def test_layouts_that_are_not_so_are_refused_on_every_rank(seen):
    world = len(seen[0])
    for report in seen[0]:
        sharded, engine = report["refused"][:2]
        assert f"The model is sharded over {world} ranks, train=Layout(fsdp=8)" in sharded
        assert f"rollout=Layout(tp=8) takes 8 ranks per engine, which do not divide {world}" in engine


def test_each_rollout_samples_from_the_resharded_weights(seen):
    for report in seen[0]:
        assert report["parallel"] == len(seen[0])
        assert report["syncs"] == [["reshard", 0], ["reshard", 1]]
        assert report["ended"] == 2
        assert len(report["gaps"]) == 2 * len(seen[0])
        assert max(report["gaps"]) < 1e-5


def test_the_models_generate_is_served_by_the_engine_in_a_rollout(seen):
    drawn = set()
    for report in seen[0]:
        for served, own in report["generated"]:
            assert served == own
            drawn |= set(map(tuple, served))
    assert len(drawn) == 4 * len(seen[0])  # of each prompt on each rank, before and after the optimizer's step


def test_ranks_that_ask_for_different_sampling_are_told_alike(seen):
    first, *others = (report["refused"][2:] for report in seen[0])
    assert all(other == first for other in others)
    assert len(first) == 2
    assert "max_tokens=4" in first[0]
    assert "rank 1 with Sampling(max_tokens=5" in first[0]


def test_a_line_before_and_one_after_each_sync_are_logged(seen):
    first, second, *others = (report["logged"] for report in seen[0])
    assert not any([first, *others])
    assert [line.split(",")[0].split("=")[0] for line in second] == ["[Reshard] start", "[Reshard] duration"] * 2
    assert [line for line in second if "start" in line] == [f"[Reshard] start, weight version {n}" for n in (0, 1)]


def test_a_line_about_each_of_the_first_syncs_is_seen_without_any_set_up(seen):
    first, *others = ([line for line in error.splitlines() if "duration=" in line] for error in seen[1])
    assert len(first) == 2
    assert all(line.startswith("[Reshard] duration=") for line in first)
    assert all("transferred=" in line and "(minimum " in line and "peak=+" in line for line in first)
    assert not any(others)


@pytest.mark.slow
def test_a_float32_model_is_sent_to_an_engine_in_bfloat16_in_half_the_bytes(seen, tmp_path):
    reports, _ = seen
    tp, pp = 2, len(reports) // 2
    for report, whole in zip(looped(tmp_path, tp, pp, "bfloat16")[0], reports, strict=True):
        assert report["syncs"] == [["reshard", 0], ["reshard", 1]]
        assert [2 * sent for sent in report["bytes"]] == whole["bytes"]
        assert max(whole["bytes"]) > 0
        assert max(report["gaps"]) < 0.1


@pytest.mark.slow
def test_the_loop_of_the_page_runs_unchanged_on_eight_ranks(tmp_path):
    """One engine in bf16, four ranks to a layer and two stages, beside a float32 model sharded over all eight."""
    reports, ended = ran("page.py", tmp_path, 8)
    for report, end in zip(reports, ended, strict=True):
        assert (report["ranks"], report["weights"], report["dtype"]) == (8, "reshard", "torch.bfloat16")
        assert report["version"] == 1  # the second rollout's, after a step
        assert max(report["gaps"]) < 0.1  # below the token that the float32 model scores highest
        before, after = "weights are on their way to the engine", "the engine samples from the model's weights"
        assert end.stdout.splitlines() == [before, after] * 2
    assert len({tuple(said) for report in reports for said in report["said"]}) > 2
