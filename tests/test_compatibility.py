"""What was promised to plugins and scripts of earlier releases."""

import argparse
import importlib
import re
import runpy
from pathlib import Path

import pytest
from trlx_hybrid import HybridConfig
from trlx_hybrid.contract.types import Finding
from trlx_hybrid.plugins.host import Host
from trlx_hybrid.testing.conformance import check_engine, check_rollout, check_weights

ROOT = Path(__file__).parents[1]
Old = runpy.run_path(str(ROOT / "tests" / "plugins_of_0_1.py"), run_name="plugins_of_0_1")["Old"]
ENGINE = {"max_model_len": 128}


def test_a_plugin_of_0_1_trains_with_all_its_components_and_hooks(tiny_trainer, capsys):
    old = Old()
    names = {"engine": "old", "weights": "old", "rollout": "old", "scoring": "old"}
    trainer = tiny_trainer(plugins=[old], max_steps=2, hybrid=HybridConfig(**names, engine_options=ENGINE))
    trainer.train()
    with pytest.warns(FutureWarning, match="session.advantages_plugin now"):
        former = trainer.session.adviser  # as a test reads it that `trlx-hybrid new` wrote
    assert former is trainer.session.advantages_plugin is not None
    trainer.session.close()
    assert "an old plugin" in capsys.readouterr().err
    assert [log["hybrid/old_requests"] for log in trainer.state.log_history if "loss" in log] == [4.0, 4.0]
    host = Host(())
    host.register(old, "old")
    commands = argparse.ArgumentParser().add_subparsers()
    host.call("trlx_command", commands=commands)
    assert "old" in commands.choices
    assert host.call("trlx_doctor", options=None) == [[Finding(topic="old", text="fine", problem=False)]]
    assert set(old.called) == {name for name in dir(Old) if name.startswith("trlx_")}


def test_its_components_do_what_today_s_checks_ask():
    check_engine("old", ENGINE, plugins=[Old()])
    check_engine("old", ENGINE | {"enable_sleep_mode": True}, plugins=[Old()])
    check_weights("old", engine="old", engine_options=ENGINE, plugins=[Old()])
    check_rollout("old", engine="old", engine_options=ENGINE, plugins=[Old()])


def test_what_is_listed_as_public_is_there():
    page = (ROOT / "docs" / "compatibility.md").read_text().partition("## What is public")[2]
    listed = re.findall(r"`(trlx_hybrid(?:\.\w+)+)`", page.replace("`, `", "` `"))
    assert "trlx_hybrid.contract.protocols" in listed
    for path in listed:
        importlib.import_module(path)
