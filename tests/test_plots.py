"""The plots and tables of real weights that learn."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks import plots, real
from benchmarks.real_tasks import TASKS

SVG = "{http://www.w3.org/2000/svg}"


def curves(second: float, rises: bool = True) -> dict:
    """A run of 20 steps of `second` seconds, whose reward rises evenly to 0.95, or stays 0."""
    rewards = [step / 20 * rises for step in range(20)]
    accuracy = {"held_out": 0.75 * rises, "held_out_steps": [10, 20], "held_out_accuracy": [0.25 * rises, 0.75 * rises]}
    return {"seed": 0, "startup": 12.3, "seconds": [second] * 20, "reward": rewards, "gap": [0.01] * 20, **accuracy}


RUNS = {
    "full": {"trl": [curves(3.0)], "tuned": [curves(2.0)], "import": [curves(0.5), curves(0.25), curves(0.5)]},
    "lora": {"trl": [curves(5.0, False), curves(5.0), curves(5.0)], "import": [curves(0.5)]},
}
INVENTED = {
    "device": "nvidia-h200",
    "metrics": real.metrics_of(RUNS),
    "settings": {"curves": RUNS, "never": real.never(RUNS)},
}


def points(element: ElementTree.Element) -> list[tuple[float, ...]]:
    return [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]


def test_a_plot_has_a_line_for_each_run_and_the_median_of_each_arm() -> None:
    drawn = ElementTree.fromstring(plots.plot("full", RUNS["full"], "nvidia-h200"))
    lines = drawn.findall(f"{SVG}polyline")
    counted = [line.attrib["class"] for line in lines]
    assert counted == ["run trl", "run tuned", *["run import"] * 3, "median trl", "median tuned", "median import"]
    ends = [points(line)[-1] for line in lines]
    (learned,) = {y for _, y in ends}  # all end with the same reward
    assert plots.TOP < learned < plots.BOTTOM
    assert ends[0][0] == plots.RIGHT  # the slowest run ends where the axis does
    assert abs((ends[2][0] - plots.LEFT) / (plots.RIGHT - plots.LEFT) - 0.5 / 3.0) < 1e-3
    assert ends[-1] == ends[2]  # the median of 0.5, 0.25 and 0.5 seconds a step
    assert [len(points(line)) for line in lines] == [20 - real.SMOOTHED + 1] * len(lines)
    circles = [circle.attrib for circle in drawn.findall(f"{SVG}circle")]
    assert [circle["class"] for circle in circles] == ["trl"] * 2 + ["tuned"] * 2 + ["import"] * 2
    assert float(circles[1]["cx"]) == plots.RIGHT  # the accuracy after the last step of the slowest run
    assert float(circles[1]["cy"]) == pytest.approx(plots.BOTTOM - 0.75 * (plots.BOTTOM - plots.TOP), abs=0.05)
    shown = [text.text for text in drawn.findall(f"{SVG}text")]
    assert {"TRL", "TRL, tuned", "trlx_hybrid", "0.8", "20", "60"} <= set(shown)


def test_each_arm_has_a_colour_in_the_light_and_in_the_dark() -> None:
    assert plots.NAMES.keys() == set(real.ARMS)
    assert plots.TRAINED.keys() == set(real.KINDS)
    for arm in real.ARMS:
        assert len(set(re.findall(rf"\.{arm}{{stroke:(#\w+)}}", plots.STYLE))) == 2


def test_axes_have_round_numbers() -> None:
    assert list(plots.ticks(61.0)) == [0, 10, 20, 30, 40, 50, 60]
    assert list(plots.ticks(540.0)) == [0, 100, 200, 300, 400, 500]
    assert list(plots.ticks(0.9)) == [0]


def test_a_table_has_a_row_for_each_kind_and_counts_runs_that_never_reached_the_reward() -> None:
    head, _, *rows = plots.table(INVENTED, plots.FIRST).splitlines()
    assert head == "| seconds | TRL | TRL, tuned | here |"
    assert len(rows) == len(RUNS) * len(plots.FIRST)
    assert "| all weights: one step | 3.00 | 2.00 | 0.50 |" in rows
    assert "| LoRA: one step | 5.00 | – | 0.50 |" in rows
    (half,) = (row for row in rows if row.startswith("| LoRA: half"))
    assert half.split("|")[2].endswith(" (1 never) ")
    lost = plots.table(INVENTED | {"metrics": {"never_at_50%_trl_full": 3}}, {"seconds_to_50%": "half"})
    assert "| all weights: half | never | – | – |" in lost


def test_each_task_has_a_heading() -> None:
    assert plots.TOLD.keys() == TASKS.keys()


def test_all_tasks_are_shown_with_the_runs_that_never_reached_a_reward() -> None:
    files = plots.written({"sums": INVENTED, "tool": INVENTED})
    names = ("real-full", "real-lora", "real_tool-full", "real_tool-lora")
    assert files.keys() == {*plots.PAGES, *(f"docs/assets/{name}.svg" for name in names)}
    assert all(name in files["docs/benchmarks.md"] for name in names)
    assert files["docs/benchmarks.md"].count("- lora, trl, seed 0: never 50% of the final reward\n") == 2
    assert "| LoRA: 70% of it |" in files["docs/benchmarks.md"]
    assert "real_tool" not in files["README.md"] + files["docs/index.md"]


def test_pages_show_the_results_that_are_committed() -> None:
    """Until there is one of sums, they show nothing."""
    results = plots.committed()
    if results:
        for name, text in plots.written(results).items():
            assert (plots.ROOT / name).read_text() == text, "`python -m benchmarks.plots` writes it anew"
    else:
        assert not [*plots.ROOT.glob("docs/assets/real*-*.svg")]
        for page in plots.PAGES:
            assert plots.PLACE.findall((plots.ROOT / page).read_text()) == [""]
    assert plots.written({"sums": INVENTED}).keys() == {
        *plots.PAGES,
        "docs/assets/real-full.svg",
        "docs/assets/real-lora.svg",
    }
