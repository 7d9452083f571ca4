import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig
from trlx_hybrid import HybridConfig, hookimpl
from trlx_hybrid.config import build
from trlx_hybrid.contract.protocols import Engine, WeightSync
from trlx_hybrid.contract.types import Completion, Request, Sampling
from trlx_hybrid.errors import ComponentError, ConfigError, EngineError
from trlx_hybrid.plugins.host import Host
from trlx_hybrid.plugins.registry import BRINGS
from trlx_hybrid.plugins.selection import TrainerArguments, select
from trlx_hybrid.trl.arguments import trainer_arguments
from trlx_hybrid.weights.sync import choose


def offering(*components):
    def trlx_register(registry):
        for slot, name, extra in components:
            registry.offer(slot, name, lambda session, options: None, **extra)

    return SimpleNamespace(trlx_register=hookimpl(trlx_register))


def host_with(**plugins):
    host = Host()
    for name, components in plugins.items():
        host.register(offering(*components), name)
    return host


def chosen(host, config=None, **arguments):
    arguments.setdefault("engine_options", {})
    return select(config or HybridConfig(), TrainerArguments(**arguments), host.registry)


def test_nothing_given_leaves_stock_trl():
    assert chosen(host_with(a=[("engine", "vllm", {})])).stock


def test_use_vllm_takes_the_vllm_engine_and_server_mode_keeps_trl():
    host = host_with(a=[("engine", "vllm", {})])
    assert chosen(host, use_vllm=True).engine.component.name == "vllm"
    assert chosen(host, use_vllm=True, vllm_mode="server").stock


def test_two_engines_under_one_name_name_both_plugins():
    with pytest.raises(ComponentError, match=r"'a' and 'b' both offer engine 'x'.*TRLX_HYBRID_DISABLE=a"):
        host_with(a=[("engine", "x", {})], b=[("engine", "x", {})])


def test_auto_with_two_engines_names_both_and_the_setting():
    host = host_with(a=[("engine", "x", {})], b=[("engine", "y", {})])
    with pytest.raises(ComponentError, match=r"'x' \(plugin 'a'\) and 'y' \(plugin 'b'\).*HybridConfig\(engine="):
        chosen(host, HybridConfig(engine="auto"))
    assert chosen(host_with(a=[("engine", "x", {})]), HybridConfig(engine="auto")).engine.component.name == "x"


def test_an_unknown_engine_suggests_and_names_no_distribution_but_ours():
    with pytest.raises(ComponentError, match=r"'vlm'.*Did you mean 'vllm'") as installed:
        chosen(host_with(a=[("engine", "vllm", {})]), HybridConfig(engine="vlm"))
    assert "pip install" not in str(installed.value)
    with pytest.raises(ComponentError, match=r"'vlm'.*Did you mean 'vllm'.*`pip install trlx-hybrid-vllm`"):
        chosen(host_with(), HybridConfig(engine="vlm"))
    with pytest.raises(ComponentError, match=r"'remote'. It comes with trlx-hybrid-ray: `pip install trlx-hybrid-ray`"):
        chosen(host_with(), HybridConfig(engine="remote"))
    with pytest.raises(
        ComponentError, match=r"'mine'.*none \(`pip install trlx-hybrid-vllm` brings 'vllm'; "
    ) as unknown:
        chosen(host_with(), HybridConfig(engine="mine"))
    assert "It comes with" not in str(unknown.value)


def test_what_our_distributions_bring_is_what_they_offer():
    offered = Host.load().registry
    for slot, brings in BRINGS.items():
        names = {c.name: c.plugin for c in offered.components(slot) if c.plugin != "builtin"}
        assert {name: f"trlx-hybrid-{plugin}" for name, plugin in names.items()} == brings


TALKS = ("rollout", "talks", {"converses": True, "needs": {"streams"}})


def test_tools_take_the_installed_rollout_that_converses_on_an_engine_that_serves_it():
    def rollout(host, rollout=None, tools=True):
        return chosen(host, HybridConfig(engine="x", rollout=rollout), tools=tools).rollout.component.name

    streams = ("engine", "x", {"streams": True})
    assert rollout(host_with(a=[streams, TALKS])) == "talks"
    assert rollout(host_with(a=[streams, TALKS]), tools=False) == "single_turn"
    assert rollout(host_with(a=[streams])) == "single_turn"
    assert rollout(host_with(a=[("engine", "x", {}), TALKS])) == "single_turn"
    with pytest.raises(ConfigError, match="rollout='talks' needs an engine that takes requests one at a time"):
        rollout(host_with(a=[("engine", "x", {}), TALKS]), "talks")
    two = host_with(a=[streams, TALKS], b=[("rollout", "chats", {"converses": True})])
    with pytest.raises(ComponentError, match=r"'chats' \(plugin 'b'\) and 'talks' \(plugin 'a'\).*rollout="):
        rollout(two)
    assert rollout(two, "chats") == "chats"
    assert rollout(host_with(a=[("engine", "x", {}), TALKS], b=[("rollout", "chats", {"converses": True})])) == "chats"


def test_a_scoring_is_chosen_by_name_beside_any_engine_and_is_trls_otherwise():
    host = host_with(a=[("engine", "x", {}), ("scoring", "mine", {})])
    for engine, why in ((None, "default"), ("x", "default; `pip install trlx-hybrid-training` leaves out padding")):
        assert str(chosen(host, HybridConfig(engine=engine)).scoring).startswith(f"scoring=padded ({why}")
        mine = chosen(host, HybridConfig(engine=engine, scoring="mine")).scoring
        assert str(mine) == "scoring=mine (HybridConfig.scoring)"
    with pytest.raises(ConfigError, match="scoring 'padded' has no setting 'deferred'"):
        chosen(host, HybridConfig(scoring_options={"deferred": True}))
    with pytest.raises(ComponentError, match=r"'packd'. Did you mean 'packed'\? It comes with trlx-hybrid-training"):
        chosen(host, HybridConfig(scoring="packd"))
    with pytest.raises(ComponentError, match=r"made a NoneType without .*score, which .*Scoring` requires"):
        mine.component.build(None, mine.options)


def test_auto_takes_a_scoring_that_proves_itself_where_an_engine_of_ours_samples():
    proving = [("engine", "x", {}), ("scoring", "second", {"proves": True, "order": 1}), ("scoring", "mine", {})]
    host = host_with(a=[*proving, ("scoring", "first", {"proves": True}), ("scoring", "named", BY_NAME)])

    def scoring(**given):
        return str(chosen(host, HybridConfig(**given), unscored=None).scoring)

    assert scoring(engine="x") == scoring(engine="x", scoring=None) == "scoring=first (auto)"
    assert scoring(engine="x", scoring="padded") == "scoring=padded (HybridConfig.scoring)"
    assert scoring() == scoring(scoring="auto") == "scoring=padded (default)"  # TRL samples: TRL to the bit
    own = chosen(host, HybridConfig(engine="x"), unscored="Mine._forward computes its log-probs")
    assert str(own.scoring) == "scoring=padded (Mine._forward computes its log-probs)"


BY_NAME = {"proves": True, "order": -1, "by_name": True}


def test_auto_passes_over_a_weight_path_that_only_its_name_chooses():
    host = host_with(
        a=[("engine", "x", {}), ("weights", "named", {"by_name": True, "order": -1}), ("weights", "copies", {})]
    )

    def paths(weights):
        return [c.component.name for c in chosen(host, HybridConfig(engine="x", weights=weights)).weight_paths]

    assert paths("auto") == ["copies", "gather"]
    assert paths("named") == ["named"]


def test_an_engine_knows_before_it_is_built_what_weight_paths_ask_for():
    host = host_with(
        a=[("engine", "x", {}), ("weights", "slots", {"needs": {"lora_slots"}}), ("weights", "copies", {"order": 1})]
    )

    def asked(weights):
        return {
            n for c in chosen(host, HybridConfig(engine="x", weights=weights)).weight_paths for n in c.component.needs
        }

    assert asked("auto") == asked("slots") == {"lora_slots"}
    assert asked("copies") == set()


def test_an_engine_that_cannot_work_here_says_why():
    host = host_with(a=[("engine", "vllm", {"unavailable": lambda: "no GPU driver. Install one."})])
    with pytest.raises(ComponentError, match=r"'vllm' \(plugin 'a'\) cannot be used here: no GPU driver"):
        chosen(host, use_vllm=True)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (HybridConfig(engine="transformers"), {"use_vllm": True}, "contradicts use_vllm=True"),
        (HybridConfig(engine="vllm"), {"use_vllm": True, "vllm_mode": "server"}, "vllm_mode='server'"),
        (HybridConfig(rollout="single_turn"), {}, "TRL's own generation path"),
        (HybridConfig(engine_options={"seed": 1}), {}, "engine_options is set, but TRL's own generation path"),
        (HybridConfig(offload="none"), {}, "offload is set, but TRL's own generation path"),
        (HybridConfig(verify_every=10), {}, "verify_every is set, but TRL's own generation path"),
        (HybridConfig(max_logprob_gap=1.0), {}, "max_logprob_gap is set, but TRL's own generation path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config, arguments, message):
    with pytest.raises(ConfigError, match=message):
        chosen(host_with(a=[("engine", "vllm", {})]), config, **arguments)


def test_unknown_keys_suggest_the_nearest():
    with pytest.raises(ConfigError, match=r"HybridConfig.offload is 'some'; it takes auto, all, none"):
        HybridConfig(offload="some")
    with pytest.raises(ConfigError, match=r"HybridConfig has no setting 'engin'. Did you mean 'engine'"):
        HybridConfig.coerce({"engin": "vllm"})
    from trlx_hybrid_vllm.options import VLLMOptions

    with pytest.raises(ConfigError, match=r"'enforce_eagr'. Did you mean 'enforce_eager'"):
        build(VLLMOptions, {"enforce_eagr": True}, "options")


def test_options_of_the_weight_sync_reach_the_path_that_auto_takes():
    @dataclass
    class Waiting:
        deadline: float = 300.0

    class Path(WeightSync):
        sync = None

        def __init__(self, name, reason, options):
            self.name, self.reason, self.options = name, reason, options

        def refuses(self):
            return self.reason

    def path(name, reason=None):
        return lambda session, options: Path(name, reason, options)

    class Plugin:
        @hookimpl
        def trlx_register(self, registry):
            registry.offer("engine", "x", path("x"))
            registry.offer("weights", "first", path("first", "not here"), order=1)
            registry.offer("weights", "second", path("second"), order=2, options=Waiting)

    host = Host()
    host.register(Plugin(), "a")
    selection = chosen(host, HybridConfig(engine="x", weights_options={"deadline": 5}))
    sync, why = choose(selection, lambda choice: choice.component.build(None, choice.options))
    assert (sync.name, sync.options, why) == ("second", Waiting(deadline=5), "auto; not first: not here")
    with pytest.raises(ConfigError, match=r"weights_options has no setting 'deadlin'. Did you mean 'deadline'"):
        chosen(host, HybridConfig(engine="x", weights_options={"deadlin": 5}))


class Sparse(Engine):
    """Brings all that the protocol requires but `sleep`, which it inherits, and `quantized`."""

    max_model_len, dtype, weights_lost, sleeps, asleep_bytes = 64, torch.float32, True, False, 0

    def __init__(self, session=None, options=None):
        pass

    def generate(self, requests, sampling):
        return [Completion(token_ids=[1])] * (len(requests) - 1)

    load_weights = differing = wake = resident = close = lambda self, *_: None


class Whole(Sparse):
    quantized = False

    def sleep(self, keep_weights=False):
        pass


def component_of(factory, slot="engine"):
    def trlx_register(registry):
        registry.offer(slot, "x", factory)

    host = Host()
    plugin = SimpleNamespace(trlx_register=hookimpl(trlx_register))
    host.register(plugin, "mine", distribution="trlx-mine", version="1.2")
    return host.registry.choose(slot, "x")


def test_a_built_component_is_held_against_its_protocol():
    with pytest.raises(ComponentError) as caught:
        component_of(Sparse).build(None, None)
    message = "The engine 'x' (plugin 'mine', trlx-mine 1.2) made a Sparse without quantized, sleep, which "
    assert str(caught.value).startswith(message + "`trlx_hybrid.contract.protocols.Engine` requires.")
    with pytest.raises(ComponentError, match="made a object without asleep_bytes, close"):
        component_of(lambda *_: object()).build(None, None)
    bare = SimpleNamespace(name="x", refuses=None, sync=None)  # the session calls the rest as well
    missing = "check, forget, keeps_weights, note, open, put_back, release"
    with pytest.raises(ComponentError, match=f"without {missing}, which"):
        component_of(lambda *_: bare, "weights").build(None, None)
    engine = component_of(Whole).build(None, None)
    with pytest.raises(EngineError, match="Whole does not say where its weights lie"):
        engine.regions(None)
    with pytest.raises(EngineError, match="Whole takes no requests one at a time"):
        engine.stream(None)


def test_a_factory_by_name_is_imported_when_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("def weights(session, options): return session, options\n")
    monkeypatch.syspath_prepend(tmp_path)
    component = component_of("imported_late:weights")
    assert "imported_late" not in sys.modules
    assert component.factory(1, 2) == (1, 2)
    monkeypatch.delitem(sys.modules, "imported_late")
    with pytest.raises(ComponentError, match="failed in `factory`: ModuleNotFoundError: No module named 'no_such'"):
        component_of("no_such.place:Engine").build(None, None)
    with pytest.raises(ComponentError, match=r"with a factory that is a str\. .*module:Class"):
        component_of("no_such.place")


def test_what_an_engine_generates_is_one_completion_per_request():
    component = component_of(Whole)
    completion = Completion(token_ids=[1])
    sampling, requests = Sampling(max_tokens=1), [Request(prompt_ids=[5], seed=0)] * 4
    assert component.completions([completion], requests[:1], sampling) == [completion]
    for sampled, found in [([completion] * 3, "list of 3"), (None, "NoneType"), ([[1]] * 4, "list with a list in it")]:
        with pytest.raises(ComponentError, match=rf"plugin 'mine', trlx-mine 1.2\) returned a {found} for 4 requests"):
            component.completions(sampled, requests, sampling)


def test_trls_arguments_that_say_nothing_leave_an_engines_own_defaults(tmp_path):
    @dataclass
    class Own:
        max_model_len: int = 4096
        max_num_seqs: int = 7

    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert args.vllm_max_model_length is None
    host = Host()
    host.register(offering(("engine", "x", {"options": Own})), "mine")
    own = select(HybridConfig(engine="x"), trainer_arguments(args), host.registry).engine.options
    assert own == Own(max_model_len=4096, max_num_seqs=8 * args.gradient_accumulation_steps)


def test_bad_json_and_wrong_types_are_refused():
    assert HybridConfig(engine_options='{"dtype": "float32"}').options("engine") == {"dtype": "float32"}
    with pytest.raises(ConfigError, match="not valid JSON"):
        HybridConfig(engine_options="{dtype}")
    with pytest.raises(ConfigError, match="must be a mapping"):
        HybridConfig(engine_options="[1]")
    with pytest.raises(ConfigError, match="0 or more"):
        HybridConfig(verify_every=-1)


def test_the_config_is_parsed_from_flags_and_yaml_beside_trls(tmp_path):
    from trl import ModelConfig, ScriptArguments
    from trlx_hybrid import TrlParser

    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, HybridConfig))
    common = ["--dataset_name", "d", "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]
    flags = ["--engine", "vllm", "--engine_options", '{"enforce_eager": true}', "--disable_plugins", "a", "b"]
    hybrid = parser.parse_args_and_config([*common, *flags])[3]
    assert (hybrid.engine, hybrid.options("engine")) == ("vllm", {"enforce_eager": True})
    assert hybrid.disable_plugins == ["a", "b"]
    file = tmp_path / "config.yaml"
    file.write_text("engine: vllm\nengine_options:\n  dtype: float32\nverify_every: 7\n")
    hybrid = parser.parse_args_and_config([*common, "--config", str(file)])[3]
    assert (hybrid.engine, hybrid.options("engine"), hybrid.verify_every) == ("vllm", {"dtype": "float32"}, 7)
    file.write_text("enigne: vllm\n")
    with pytest.raises(ConfigError, match=r"sets 'enigne', which nothing reads. Did you mean 'engine'"):
        parser.parse_args_and_config([*common, "--config", str(file)])
    rest = parser.parse_args_and_config([*common, "--config", str(file)], return_remaining_strings=True)[-1]
    assert rest == ["--enigne", "vllm"]


def test_a_config_may_set_what_a_subcommand_reads(tmp_path):
    from trlx_hybrid import TrlParser

    def parser():
        whole = TrlParser()
        whole.add_subparsers(dest="command", parser_class=TrlParser).add_parser("train", dataclass_types=[HybridConfig])
        return whole

    file = tmp_path / "config.yaml"
    file.write_text("verify_every: 7\n")
    assert parser().parse_args_and_config(["train", "--config", str(file)])[0].verify_every == 7
    file.write_text("verify_evry: 7\n")
    with pytest.raises(ConfigError, match=r"sets 'verify_evry', which nothing reads. Did you mean 'verify_every'"):
        parser().parse_args_and_config(["train", "--config", str(file)])
    assert parser().set_defaults_with_config(verify_evry=7) == ["--verify_evry", "7"]
