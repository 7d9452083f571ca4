import json

import pytest
from trlx_hybrid import environment
from trlx_hybrid.cli import main


def test_plugins_lists_plugins_and_components(capsys):
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "vllm  trlx-hybrid-vllm" in out
    assert "gather" in out
    assert main(["plugins", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"name": "vllm", "distribution": "trlx-hybrid-vllm"}.items() <= report["plugins"][0].items()
    assert {c["name"] for c in report["components"]} == {"vllm", "alias", "lora", "copy", "gather", "single_turn"}


def test_plugins_by_hook(capsys):
    assert main(["plugins", "--hook", "trlx_register", "--json"]) == 0
    assert [p["name"] for p in json.loads(capsys.readouterr().out)["plugins"]] == ["vllm"]
    assert main(["plugins", "--hook", "trlx_advantages"]) == 0
    assert "no plugin implements trlx_advantages" in capsys.readouterr().out


def test_disabled_plugins_are_said(capsys, monkeypatch):
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "vllm")
    assert main(["plugins"]) == 0
    assert "switched off by TRLX_HYBRID_DISABLE: vllm" in capsys.readouterr().out


def test_doctor_says_what_works_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "vllm           ready" in out
    assert "nothing to do" in out


def test_doctor_names_untested_versions_and_bad_pairs_with_advice(capsys, monkeypatch):
    monkeypatch.setitem(environment.SUPPORTED, "trl", "9.9")
    monkeypatch.setattr(environment, "KNOWN_BAD", (environment.KnownBad("torch", "2", "trl", "1", "try another"),))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "untested: pip install 'trl==9.9.*'" in out
    assert "try another" in out
    assert "see the problems above" in out


def test_env_is_ready_for_a_bug_report(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert all(f"- {name}: " in out for name in ("python", "platform", "torch", "trl", "devices", "plugins"))


def test_help_of_every_command(capsys):
    for command in ([], ["plugins"], ["doctor"], ["env"]):
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--help"])
    assert "bug report" in capsys.readouterr().out
