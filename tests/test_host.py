import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest
from trlx_hybrid import hookimpl
from trlx_hybrid.errors import ComponentError, ConfigError, PluginError
from trlx_hybrid.plugins.host import Host, PluginInfo, check_ranks_agree


class Observer:
    def __init__(self):
        self.seen = []

    @hookimpl
    def trlx_enter_phase(self, phase, step):
        self.seen.append((phase, step))


class Broken:
    @hookimpl
    def trlx_enter_phase(self, session):
        raise KeyError("boom")


class Advice:
    def __init__(self, value):
        self.value = value

    @hookimpl
    def trlx_advantages(self, batch):
        return self.value


@pytest.fixture
def entry_points(monkeypatch, tmp_path):
    """Pretend plugins are installed: modules on sys.path under entry points of our group."""

    def install(**sources):
        found = []
        for name, source in sources.items():
            (tmp_path / f"fake_{name}.py").write_text(source)
            found.append(EntryPoint(name, f"fake_{name}", "trlx_hybrid"))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr("trlx_hybrid.plugins.host.entry_points", lambda: EntryPoints(found))
        for name in sources:
            monkeypatch.delitem(sys.modules, f"fake_{name}", raising=False)

    return install


def enter(host):
    return host.call("trlx_enter_phase", session=None, phase="rollout", step=3)


def test_a_hook_reaches_every_plugin():
    host, one, two = Host(), Observer(), Observer()
    host.register(one, "one")
    host.register(two, "two")
    enter(host)
    assert one.seen == two.seen == [("rollout", 3)]


def test_plugins_load_sorted_by_name_whatever_the_order_of_installation(entry_points):
    entry_points(zeta="", alpha="", mid="")
    assert [p.name for p in Host.load().plugins] == ["alpha", "mid", "zeta"]


def test_disabled_plugins_are_not_even_imported(entry_points, monkeypatch):
    entry_points(bad="raise RuntimeError('imported')", other="raise RuntimeError('imported')", good="")
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "bad")
    assert [p.name for p in Host.load(disable=["other"]).plugins] == ["good"]
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "bad,Broken-1")  # as the message about it says
    script = [Observer(), Broken(), Observer()]
    assert [p.name for p in Host.load(["other"], script).plugins] == ["good", "Observer-0", "Observer-2"]


def test_a_plugin_that_raises_on_import_is_named_with_the_way_out(entry_points):
    entry_points(bad="import no_such_module_at_all")
    with pytest.raises(PluginError, match=r"'bad'.*does not import.*no_such_module_at_all.*TRLX_HYBRID_DISABLE=bad"):
        Host.load()


def test_one_name_claimed_twice_names_both(monkeypatch):
    claims = [EntryPoint("same", f"module_{i}", "trlx_hybrid") for i in (1, 2)]
    monkeypatch.setattr("trlx_hybrid.plugins.host.entry_points", lambda: EntryPoints(claims))
    with pytest.raises(PluginError, match=r"'same' is claimed by module_1 and by module_2"):
        Host.load()


def test_a_plugin_for_another_version_of_the_api_is_refused_before_it_is_imported(monkeypatch):
    claims = [EntryPoint("newer", "no_such_module", "trlx_hybrid.v2")]
    monkeypatch.setattr("trlx_hybrid.plugins.host.entry_points", lambda: EntryPoints(claims))
    with pytest.raises(PluginError, match=r"'newer'.*version 2 of the plugin API.*has version 1\. Upgrade trlx-hybrid"):
        Host.load()
    assert Host.load(disable=["newer"]).plugins == []
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "newer")
    assert Host.load().plugins == []


def test_a_plugin_for_several_versions_of_the_api_is_loaded_for_this_one(monkeypatch):
    groups = {"trlx_hybrid": "types", "trlx_hybrid.v2": "no_such_module", "trlx_hybrid.views": "no_such_module"}
    claims = [EntryPoint("both", module, group) for group, module in groups.items()]
    claims.append(EntryPoint("named", "string", "trlx_hybrid.v1"))
    monkeypatch.setattr("trlx_hybrid.plugins.host.entry_points", lambda: EntryPoints(claims))
    assert [plugin.name for plugin in Host.load().plugins] == ["both", "named"]


def test_an_unknown_hook_suggests_the_nearest():
    plugin = SimpleNamespace(trlx_enter_fase=hookimpl(lambda phase: None))
    with pytest.raises(PluginError, match=r"'typo' \(dist 1.2\).*'trlx_enter_fase'.*Did you mean 'trlx_enter_phase'"):
        Host().register(plugin, "typo", distribution="dist", version="1.2")


def test_a_hook_without_its_marker_is_an_error():
    class Forgetful:
        @hookimpl
        def trlx_configure(self, session):
            pass

        def trlx_enter_phase(self, session):
            pass

    with pytest.raises(PluginError, match=r"Plugin 'mine' .*'trlx_enter_phase' without the marker .*hookimpl"):
        Host().register(Forgetful(), "mine")


def test_disabling_what_is_not_installed_suggests_the_nearest(entry_points, monkeypatch):
    entry_points(alpha="")
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "elsewhere")
    assert Host.load(["alpha"]).plugins == []
    with pytest.raises(ConfigError, match=r"disable_plugins has 'alhpa'.*Did you mean 'alpha'.*Installed: alpha"):
        Host.load(["alhpa"])


def test_a_wrong_argument_names_plugin_and_hook():
    plugin = SimpleNamespace(trlx_enter_phase=hookimpl(lambda fase: None))
    with pytest.raises(PluginError, match=r"'args' \(dist 1.2\).*trlx_enter_phase.*fase") as caught:
        Host().register(plugin, "args", distribution="dist", version="1.2")
    assert caught.value.hook == "trlx_enter_phase"


def test_an_exception_inside_a_hook_names_plugin_distribution_version_and_hook():
    host = Host()
    host.register(Observer(), "innocent")
    host.register(Broken(), "guilty", distribution="guilty-dist", version="9.9")
    with pytest.raises(
        PluginError, match=r"'guilty' \(guilty-dist 9.9\).*trlx_enter_phase.*KeyError: 'boom'"
    ) as caught:
        enter(host)
    assert (caught.value.plugin, caught.value.hook) == ("guilty", "trlx_enter_phase")
    assert isinstance(caught.value.__cause__, KeyError)


def test_our_own_errors_pass_through_hooks_unchanged():
    class Refusing:
        @hookimpl
        def trlx_configure(self, session):
            raise ComponentError("set this and that")

    host = Host()
    host.register(Refusing(), "refusing")
    with pytest.raises(ComponentError) as caught:
        host.call("trlx_configure", session=None)
    assert str(caught.value) == "set this and that"


def test_an_exception_in_register_names_the_plugin():
    class Offering:
        @hookimpl
        def trlx_register(self, registry):
            raise ValueError("no")

    with pytest.raises(PluginError, match=r"'offering'.*trlx_register.*ValueError: no"):
        Host().register(Offering(), "offering")


def test_advantages_stop_at_the_first_answer_that_is_not_none():
    host = Host()
    host.register(Advice(None), "a")
    assert host.call("trlx_advantages", session=None, batch={}) is None
    host.register(Advice(7), "b")
    assert host.call("trlx_advantages", session=None, batch={}) == 7


def test_ranks_with_other_plugins_are_told_rank_and_plugin():
    ours = [PluginInfo("vllm", "trlx-hybrid-vllm", "0.1.0", ())]
    check_ranks_agree([ours, ours])
    theirs = [PluginInfo("vllm", "trlx-hybrid-vllm", "0.2.0", ())]
    with pytest.raises(PluginError, match=r"Rank 1 has vllm 0\.2\.0, rank 0 has vllm 0\.1\.0"):
        check_ranks_agree([ours, theirs])
    with pytest.raises(PluginError, match=r"Rank 2 has no vllm"):
        check_ranks_agree([ours, ours, []])
