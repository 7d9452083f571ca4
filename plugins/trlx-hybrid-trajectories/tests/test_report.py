"""A run records what it does, and its report shows that with the right figures, of a killed and resumed run too."""

import argparse
import html.parser
import json
import re
import shutil
import subprocess

import pytest
import trlx_hybrid
from trlx_hybrid.contract.types import Trajectory
from trlx_hybrid.errors import HybridError
from trlx_hybrid.testing.models import character_tokenizer
from trlx_hybrid_trajectories.choice import TOKENS, choose
from trlx_hybrid_trajectories.cli import add_report
from trlx_hybrid_trajectories.events import ACTIVITIES, read_events, trace
from trlx_hybrid_trajectories.page import packaged
from trlx_hybrid_trajectories.report import as_report, curves

from tests.support.recorded import add_lines, append

REPORT = {"plugin_options": {"trajectories": {"report": True}}}
ENGINE = {"engine": "vllm", "engine_options": {"max_model_len": 64}, **REPORT}
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """Refuses a page whose tags do not match; keeps its text, its tags and the data of its charts."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.tags, self.ids = [], "", [], []
        self.data = None
        self.feed(page)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data = self.data or (json.loads(data) if data.startswith("{") else None)
        elif self.open[-1:] != ["style"]:
            self.text += data

    def chart(self, title):
        """The one of that title: a list of pairs of x and value by name of the curve."""
        (found,) = [chart for chart in self.data["charts"] if chart["title"] == title]
        return {name: list(zip(found["x"], values, strict=True)) for name, values in found["series"]}


def assert_nothing_from_elsewhere(page):
    assert "http" not in page.lower()
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon", page)
    assert not any({"src", "srcset"} & attributes.keys() or tag == "link" for tag, attributes in Page(page).tags)


def test_the_page_of_a_run_has_its_figures(run, tmp_path):
    trainer = run(trlx_hybrid.GRPOTrainer, hybrid=ENGINE, max_steps=3).trainer
    folder, history = tmp_path / "run0", trainer.state.log_history
    page = Page(as_report(folder))
    assert_nothing_from_elsewhere(as_report(folder))
    logged = [line for line in history if "loss" in line]
    for title, name in (("reward", "reward"), ("reward", "rewards/Recorder/mean"), ("loss", "loss")):
        assert page.chart(title)[name] == [(line["step"], pytest.approx(line[name], rel=1e-4)) for line in logged]
    assert page.chart("hybrid/step (seconds)").keys() == {
        f"hybrid/step/{part}_seconds" for part in ("rollout", "scoring", "loss", "optimizer")
    }
    assert "Not logged: KL to the reference model (nats) (set beta above 0)." in page.text
    sent = [line["hybrid/sync_bytes"] / 2**20 for line in logged]
    assert page.chart("MiB handed to the engine")["rank 0"] == [
        (step, pytest.approx(moved, rel=1e-4)) for step, moved in enumerate(sent)
    ]
    held = trainer.session.held_bytes
    assert held.keys() == set(trlx_hybrid.contract.types.Phase)
    for phase, owners in held.items():
        policy = page.chart(f"MiB in {phase.value}, rank 0")["policy"]
        assert policy[-1] == (2, pytest.approx(owners["policy"] / 2**20, rel=1e-4))
    assert "finished" in page.text
    assert "3 of 3" in page.text
    assert trainer.session.header_lines[0] in page.text
    assert "24 trajectories, 0 failed" in page.text
    names = [span.name for span in read_events(folder).spans]
    per_step = ["wake", "sync", "wake", "rollout", "sleep", "scoring", "train"]
    assert names == ["setup", *per_step * 3, "idle"]


def test_rows_in_flight_have_charts_of_their_own():
    names = ("staleness/mean", "staleness/max", "in_flight/occupancy", "in_flight/alone", "in_flight/tokens")
    found = curves([(1, {f"hybrid/{name}": 0.5 for name in names} | {"sampling/cut/short": 0.1})])
    charts = {title: [*series] for title, series in found.items() if series}
    assert charts == {
        "hybrid/in_flight (share)": ["hybrid/in_flight/occupancy", "hybrid/in_flight/alone"],
        "hybrid/in_flight/tokens": ["hybrid/in_flight/tokens"],
        "hybrid/staleness (optimizer steps)": ["hybrid/staleness/mean", "hybrid/staleness/max"],
        "sampling/cut": ["sampling/cut/short"],
    }


def test_timeline_and_trajectories_come_before_the_curves(tmp_path):
    write(tmp_path, 1, range(3))
    add_trajectories(tmp_path, [["one"], ["two"]])
    page = Page(as_report(tmp_path))
    parts = ["timeline", "trajectories", "curves", "syncs", "memory"]
    assert [name for name in page.ids if name in parts] == parts
    assert [a["href"] for tag, a in page.tags if tag == "a" and a["href"][1:] in parts] == [f"#{p}" for p in parts]


RANGES = """
const element = { textContent: "{}", addEventListener() {} };
globalThis.document = { getElementById: () => element, querySelectorAll: () => [] };
globalThis.IntersectionObserver = class {};
globalThis.addEventListener = () => {};
globalThis.matchMedia = () => element;
require("vm").runInThisContext(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify([range(null, 0, 0), range(null, 5, 5), range(null, 0, 2), range(null, null, null)]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
def test_zeros_have_no_axis_to_a_hundred():
    scripts = packaged("uplot/uPlot.iife.min.js") + ";" + packaged("report.js")
    done = subprocess.run(["node", "-e", RANGES], input=scripts, capture_output=True, text=True, check=True)
    zeros, fives, rising, nothing = json.loads(done.stdout)
    assert zeros == [0, 1]
    assert fives == [0, 10]
    assert rising == [0, pytest.approx(2.2)]
    assert nothing == [None, None]


def test_a_run_without_an_engine_shows_what_it_has(run, tmp_path):
    run(trlx_hybrid.GRPOTrainer, hybrid=REPORT, max_steps=2).close()
    page = Page(as_report(tmp_path / "run0"))
    assert [step for step, _ in page.chart("reward")["reward"]] == [1, 2]
    assert "TRL generates, which has none: use_vllm=True or HybridConfig.engine chooses an engine" in page.text
    assert "16 trajectories" in page.text
    assert "finished" in page.text


def test_a_run_that_recorded_nothing_shows_its_checkpoint(run, tmp_path):
    run(trlx_hybrid.GRPOTrainer, max_steps=2, save_strategy="steps", save_steps=2)
    page = Page(as_report(tmp_path / "run0"))
    assert [step for step, _ in page.chart("reward")["reward"]] == [1, 2]
    assert "From checkpoint-2/trainer_state.json, up to that checkpoint." in page.text
    assert page.text.count('plugin_options={"trajectories": {"report": True}}') == 6


def test_trlx_log_is_called_with_what_is_logged(run):
    lines = []

    class Seen:
        @trlx_hybrid.hookimpl
        def trlx_log(self, session, metrics):
            lines.append((session.step, dict(metrics)))
            metrics.clear()

    history = run(trlx_hybrid.GRPOTrainer, plugins=[Seen()], max_steps=2).trainer.state.log_history
    assert [metrics | {"step": step} for step, metrics in lines[:2]] == history[:2]
    assert "train_runtime" in lines[2][1]


# --- recordings made by hand ----------------------------------------------------------------------------------------

MARKS = (
    ("wake", 0.2),
    ("sync", 0.1),
    ("wake", 0.1),
    ("rollout", 2.0),
    ("sleep", 0.1),
    ("scoring", 0.3),
    ("train", 1.2),
)
FACTS = {
    "model": "tiny",
    "architecture": "Qwen2ForCausalLM",
    "dtype": "bfloat16",
    "device": "cuda",
    "policy_bytes": 3 << 30,
    "trainable_bytes": 3 << 30,
    "max_steps": 1000,
    "settings": {"beta": 0.0},
    "versions": {"torch": "2"},
    "trajectories": "gone.jsonl",
}


def write(folder, ranks, steps, *, begin=1e9, metrics=20, end=True, mode="w"):
    """A recording of these steps, on so many ranks."""
    (folder / "report").mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        rows, clock = [], [begin]

        def add(event, rows=rows, clock=clock, **fields):
            rows.append({"event": event, "time": clock[0]} | fields)

        add("start", rank=rank, world=ranks, **(FACTS if rank == 0 else {}))
        add("now", name="setup", step=0, training=True)
        for step in steps:
            for name, seconds in MARKS:
                phase = {"rollout": "rollout", "scoring": "train"}.get(name)
                held = {"phase": phase, "held": {"policy": 3 << 30, "KV cache": (rank + 1) << 30}} if phase else {}
                add("now", name=name, step=step, training=True, **held)
                clock[0] += seconds * (1 + rank / 10)
                if name == "sync":
                    figures = {"tensors": 3, "verified": 2, "logprob_gap": None, "weights": "reshard"}
                    add("sync", step=step, version=step, bytes=1 << 30, seconds=0.05 * (rank + 1), **figures)
            if rank == 0:
                logged = {f"hybrid/odd{i}": step * 1.2345678 + i for i in range(metrics)}
                logged |= {"loss": 1 / (step + 1), "reward": float(step), "kl": "nan"}
                add("log", step=step + 1, metrics=logged)
        if end:
            add("end", error=None)
        with (folder / "report" / f"rank{rank}.jsonl").open(mode) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def add_trajectories(folder, texts, tokenizer=None):
    """Lists of texts, by step."""
    tokenizer = tokenizer or character_tokenizer()
    for step, said in enumerate(texts):
        batch = []
        for number, text in enumerate(said):
            ids = tokenizer(text)["input_ids"]
            mask = [int(text != "failed")] * len(ids)
            prompt = tokenizer(f"{number}+1=")["input_ids"]
            batch.append(
                Trajectory(
                    prompt_ids=prompt,
                    completion_ids=ids,
                    loss_mask=mask,
                    weight_version=step,
                    reward=float(step),
                    logprobs=[-0.5] * len(ids),
                )
            )
        append(folder / "report" / "trajectories.jsonl", batch, tokenizer, step=step)


def test_a_thousand_steps_of_four_ranks_are_a_page_below_5_MB(tmp_path):
    write(tmp_path, 4, range(1000), metrics=60)
    add_trajectories(tmp_path, [["<script>alert(1)</script>" * 5] * 2] * 1000)
    page = as_report(tmp_path)
    assert len(page.encode()) < 5e6
    assert_nothing_from_elsewhere(page)
    read = Page(page)
    assert "<script>alert" not in page
    assert read.data["timeline"]["ranks"] == [0, 1, 2, 3]
    assert [len(row["begin"]) for row in read.data["timeline"]["rows"]] == [1 + 7 * 1000] * 4
    assert [len(values) for values in read.chart("seconds of a sync").values()] == [1000] * 4
    assert read.chart("KL to the reference model (nats)") == {"kl": [(step + 1, None) for step in range(1000)]}
    assert "7168 (rank 3)" in read.text  # 3 GiB of policy, 4 GiB of KV cache there
    assert "33%" in read.text  # 1 GiB of 3 went to the engine
    assert len(curves(read_events(tmp_path).logs)["hybrid/odd0"]["hybrid/odd0"]) == 1000


def test_the_trace_has_a_track_per_rank(tmp_path, capsys):
    write(tmp_path, 4, range(2))
    parser = argparse.ArgumentParser()
    add_report(parser.add_subparsers())
    options = parser.parse_args(["report", str(tmp_path), "--trace", str(tmp_path / "new" / "spans.json")])
    assert options.run(options) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/new/spans.json: 60 spans\n"
    rows = json.loads((tmp_path / "new" / "spans.json").read_text())["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "thread_name"} == {f"rank {r}" for r in range(4)}
    for rank in range(4):
        spans = [row for row in rows if row["ph"] == "X" and row["tid"] == rank]
        assert [span["name"] for span in spans] == ["setup", *[name for name, _ in MARKS] * 2]
        assert spans[4]["dur"] == pytest.approx(2e6 * (1 + rank / 10), abs=2)
    assert not (tmp_path / "report.html").exists()
    options = parser.parse_args(["report", str(tmp_path)])
    assert options.run(options) == 0
    assert (tmp_path / "report.html").is_file()


def test_a_killed_run_lacks_its_half_line_and_a_resumed_one_its_lost_steps(tmp_path):
    write(tmp_path, 2, range(6), end=False)
    with (tmp_path / "report" / "rank0.jsonl").open("a") as file:
        file.write('{"event": "now", "tim\n')  # and the resumed run began a line of its own
    assert "running, or killed: the last event is of 2001-09-09" in Page(as_report(tmp_path)).text
    write(tmp_path, 2, range(4, 8), begin=1e9 + 5e5, mode="a")
    events = read_events(tmp_path)
    assert [step for step, _ in events.logs] == list(range(1, 9))
    assert [row["step"] for rank, row in events.syncs if rank == 1] == list(range(8))
    assert events.broken == 1
    page = Page(as_report(tmp_path))
    assert "1 line of the recording left out" in page.text
    assert "in 2 starts" in page.text
    assert page.data["timeline"]["rows"][0]["end"][-1] == pytest.approx(16_000, abs=2)  # without the days between
    assert len(trace(events, "")["traceEvents"]) == 1 + 2 + 2 * (1 + 6 * 7 + 1 + 4 * 7)


def test_an_error_of_any_rank_is_at_the_top(tmp_path):
    write(tmp_path, 2, range(2))
    file = tmp_path / "report" / "rank1.jsonl"
    file.write_text(file.read_text().replace('"error": null', '"error": "OutOfMemoryError: <b>"'))
    page = as_report(tmp_path)
    assert "stopped by an error on rank 1: OutOfMemoryError: &lt;b&gt;" in page


def test_completions_of_a_prompt_are_shown_over_the_steps(tmp_path):
    write(tmp_path, 1, range(9))
    add_trajectories(tmp_path, [[f"say {step}", "failed"] for step in range(9)])
    with (tmp_path / "report" / "trajectories.jsonl").open("a") as file:
        file.write('{"step\n')
    page = Page(as_report(tmp_path))
    assert "0+1= reward 0 → 2 → 4 → 6 → 8" in page.text
    assert re.findall(r"step (\d)reward \d\s*say \1", page.text) == ["0", "2", "4", "6", "8"]
    assert "18 trajectories, 9 failed" in page.text
    assert page.text.count("1 line left out") == 1


def test_a_full_disk_ends_the_recording_and_not_the_run(run, tmp_path, caplog):
    (tmp_path / "run" / "report").mkdir(parents=True)
    (tmp_path / "run" / "report" / "rank0.jsonl").symlink_to("/dev/full")
    report = {"trajectories": {"report": True, "record": str(tmp_path / "said.jsonl")}}
    finished = run(
        trlx_hybrid.GRPOTrainer, hybrid={"plugin_options": report}, output_dir=str(tmp_path / "run"), max_steps=2
    )
    finished.trainer.session.close()
    assert finished.trainer.state.global_step == 2
    (told,) = [r.getMessage() for r in caplog.records if "run report" in r.getMessage()]
    assert "Events of the run report are lost from here on, and training goes on without: cannot write to" in told
    assert "No space left on device" in told


def test_ranks_that_a_later_start_lacks_say_nothing_of_it(tmp_path):
    write(tmp_path, 4, range(3), end=False)
    add_lines(tmp_path / "report" / "rank3.jsonl", [json.dumps({"event": "end", "time": 2e9, "error": "boom"})])
    write(tmp_path, 2, range(5), begin=3e9, mode="a")
    events = read_events(tmp_path)
    assert events.errors == {}
    assert {rank for rank, _ in events.syncs} == {0, 1}


def test_long_trajectories_are_left_out_and_counted(tmp_path):
    tokenizer = character_tokenizer()
    (tmp_path / "report").mkdir()
    add_trajectories(tmp_path, [["a" * (TOKENS + 1)], ["b"]], tokenizer)
    page = Page(as_report(tmp_path))
    assert "1 left out for their length" in page.text
    assert [value for value in page.ids if value.startswith("t") and value[1:].isdecimal()] == ["t2"]
    assert choose([]).lists == {"best": [], "worst": [], "failed": [], "over the run": []}


@pytest.mark.parametrize(
    ("folder", "message"), [("none", "is no folder. Give the output_dir"), ("", "holds no record")]
)
def test_a_folder_without_a_run_is_refused(tmp_path, folder, message):
    with pytest.raises(HybridError, match=message):
        as_report(tmp_path / folder)


def test_every_activity_has_a_colour():
    for name in ACTIVITIES:
        assert packaged("report.css").count(f"--p-{name}:") == 2
        assert f".p-{name} " in packaged("report.css")
