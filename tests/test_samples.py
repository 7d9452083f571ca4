"""The Python of the pages, executed as it stands: names that a page leaves to its reader come from the test."""

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trlx_hybrid
from datasets import Dataset
from transformers import GenerationConfig
from trl.chat_template_utils import add_response_schema
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.conformance import check_rollout
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
PYTHON = re.compile(r"^( *)```python\n(.*?)\n\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(HybridConfig\([^`]*\))`")
REFUSED = {
    "train=Layout(fsdp=8)": "takes 4 ranks per engine, which do not divide 1",
    "router_replay=True": "routes no tokens to experts",
}
"""Samples for several processes or other models, by a part of them, with what one process, or the tiny one, is told."""
NOT_RUN: dict[str, str] = {}
"""Samples by a part of them, with the reason."""


def tool(text: str) -> str:
    """Work something out.

    Args:
        text: what.
    """
    return text


def samples(page: str) -> list[str]:
    """The Python blocks of a page. One with a title is a whole file, which has tests of its own."""
    return [textwrap.dedent(code) for _, code in PYTHON.findall((ROOT / page).read_text())]


@pytest.fixture
def execute(run, monkeypatch, tmp_path) -> Callable[..., dict[str, Any]]:
    """Executes a page's samples in order, with common names, and returns these.

    `GRPOTrainer(..., setting=value)` makes a real trainer with these and `settings`, by default on a tiny model;
    `trainers` among the names returned has all that were made. `edits` are made to the page's text.
    """
    monkeypatch.chdir(tmp_path)
    real = trlx_hybrid.GRPOTrainer

    def start(page: str, *, edits: Any = (), settings: Any = (), **names: Any) -> dict[str, Any]:
        trainers: list[Any] = []

        def build(*rest: Any, **given: Any) -> Any:
            assert rest in ((), (...,))
            chosen = {"max_steps": 1, "train": False} | dict(settings) | given
            trainers.append(run(real, **chosen).trainer if rest else real(**given))
            return trainers[-1]

        monkeypatch.setattr(trlx_hybrid, "GRPOTrainer", build, raising=False)
        names |= {"GRPOTrainer": build, "HybridConfig": trlx_hybrid.HybridConfig, "trainers": trainers}
        names["__name__"] = "__main__"
        assert all(any(old in code for code in samples(page)) for old in dict(edits))
        for code in samples(page):
            if any(part in code for part in NOT_RUN):
                continue
            for old, new in dict(edits).items():
                code = code.replace(old, new)
            message = next((text for part, text in REFUSED.items() if part in code), None)
            if message is None:
                exec(compile(code, page, "exec"), names)
            else:
                with pytest.raises(ConfigError, match=message):
                    exec(compile(code, page, "exec"), names)
        return names

    return start


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process as the only one of a group, for samples that shard a model."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_page_with_samples_is_executed_here() -> None:
    executed = set(re.findall(r'execute\(\s*"(.*?)"', Path(__file__).read_text()))
    assert executed == {str(page.relative_to(ROOT)) for page in PAGES if samples(page)}
    for part in [*REFUSED, *NOT_RUN]:
        assert any(part in code for page in PAGES for code in samples(page))


def test_configs_in_the_text_can_be_made() -> None:
    found = {" ".join(code.split()) for page in PAGES for code in INLINE.findall(page.read_text())}
    assert len(found) >= 8
    for code in found:
        eval(code, {"HybridConfig": trlx_hybrid.HybridConfig})


def test_changed_imports_and_json() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    imports = re.findall(r"^\+(from .*)", text, re.MULTILINE)
    assert imports
    for line in imports:
        exec(line, {})
    for block in re.findall(r"^ *```json\n(.*?)```", text, re.DOTALL | re.MULTILINE):
        json.loads(block)


def test_readme(execute, capfd) -> None:
    """The first script that a stranger sees, with a tiny model in the place of the one that it downloads."""
    tokenizer = chat_tokenizer(["It is 42."])
    chatty_model(tokenizer, ["It is 42."]).save_pretrained("model")
    tokenizer.save_pretrained("model")
    edits = {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': '"model"',
        "max_steps=100": "max_steps=1, bf16=False, use_cpu=True, report_to=[]",
        "gradient_accumulation_steps=16": "gradient_accumulation_steps=1",
    }
    names = execute("README.md", edits=edits)
    (trainer,) = names["trainers"]
    assert trainer.state.global_step == 1
    assert trainer.session.live_engine is not None
    assert trainer.session.scoring.name == "packed"
    said = [[{"role": "assistant", "content": text}] for text in ("10 + 32 = 42.", "142", "none", "42 or 43")]
    assert names["right"](completions=said, total=[42] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert "weights=alias" in capfd.readouterr().err
    trainer.session.close()


def test_quickstart(execute, monkeypatch) -> None:
    """The second script's model, dataset and reward would be downloaded."""
    import datasets

    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(8)]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: Dataset.from_list(rows))
    tiny_model(max_position_embeddings=2048).save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    edits = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': '"model"',
        "reward_funcs=accuracy_reward": "reward_funcs=digits",
        "bf16=True": "bf16=True, use_cpu=True, max_steps=1, max_completion_length=8, report_to=[]",
    }
    first, second = execute("docs/quickstart.md", edits=edits)["trainers"]
    assert first.state.global_step == second.state.global_step == 1
    assert first.session.engine is None
    assert second.session.live_engine.max_model_len == 2048
    second.session.close()


def test_coming_from(execute, monkeypatch, capfd) -> None:
    """The task with all weights and with LoRA; and a reward function as verl takes it."""
    import datasets

    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(8)]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: Dataset.from_list(rows))
    tiny_model(max_position_embeddings=2048).save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    edits = {
        '"Qwen/Qwen2.5-1.5B-Instruct"': '"model"',
        "reward_funcs=accuracy_reward": "reward_funcs=digits",
        "max_completion_length=1024": "max_completion_length=8",
        "bf16=True": "bf16=True, use_cpu=True, max_steps=1, report_to=[]",
        "gradient_accumulation_steps=8": "gradient_accumulation_steps=1",
        "gradient_accumulation_steps=32": "gradient_accumulation_steps=1",
    }

    def digits(completions, **kwargs):
        return [float(sum(c.isdigit() for c in text)) for text in completions]

    names = execute("docs/coming-from.md", edits=edits, digits=digits)
    assert re.findall(r"weights=(\w+)", capfd.readouterr().err) == ["copy", "lora"]
    for trainer in names["trainers"]:
        assert trainer.state.global_step == 1
        trainer.session.close()
    reward = names["rewards_of"](lambda data_source, solution_str, ground_truth: solution_str == ground_truth)
    chats = [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
    assert reward(completions=chats, data_source=["sums"] * 2, ground_truth=["4", "4"], prompts=[]) == [1.0, 0.0]


def test_plugins(execute, run) -> None:
    """The rollout of the page, chosen as the page says, in a run."""
    names = execute("docs/plugins.md")
    plugin = ModuleType("sorted")
    plugin.trlx_register = names["trlx_register"]
    (chosen,) = [code for code in INLINE.findall((ROOT / "docs/plugins.md").read_text()) if "sorted" in code]
    config = eval(" ".join(chosen.split()), names)
    trainer = run(trlx_hybrid.GRPOTrainer, hybrid=config, plugins=[plugin], max_steps=1).trainer
    assert isinstance(trainer.session.rollout, names["SortedRollout"])
    trainer.session.close()
    longest = ModuleType("longest")
    longest.trlx_register = trlx_hybrid.hookimpl(
        lambda registry: registry.offer("rollout", "longest_of_four", lambda *given: names["LongestOfFour"]())
    )
    check_rollout("longest_of_four", engine_options={"max_model_len": 128}, plugins=[longest])


def test_hybrid_engine(execute, one_rank, capfd) -> None:
    """A trainer with sleep mode, the plain loop, and the one in accelerate's words."""
    import torch

    tokenizer = character_tokenizer()
    generated = []

    def loss(model, sampled):
        if isinstance(sampled, torch.Tensor):
            generated.append(sampled)
            return model(input_ids=sampled).logits.pow(2).mean()
        assert [len(c.token_ids) for c in sampled] == [len(c.logprobs) for c in sampled]
        return model(input_ids=torch.tensor([sampled[0].token_ids])).logits.pow(2).mean()

    edits = {
        "max_tokens=512, engine_options": "max_tokens=8, engine_options",
        '"tp_size": 4': '"tp_size": 1',
        '"pp_size": 2': '"pp_size": 1',
        '"dp_shard_size": 8': '"dp_shard_size": 1',
    }
    given = {"model": tiny_model(), "batches": [tokenizer(["a b", "12345"], padding=True, return_tensors="pt")] * 2}
    names = execute("docs/hybrid-engine.md", edits=edits, **given, tokenizer=tokenizer, optimizer=None, loss=loss)
    (trainer,) = names["trainers"]
    engine = names["engine"]
    assert engine.session.live_engine.dtype is torch.bfloat16
    assert engine.session.weights.name == "reshard"
    assert [ids.shape[0] for ids in generated] == [2, 2]
    assert capfd.readouterr().out.count("on their way") == 2
    engine.close()
    trainer.train()
    assert trainer.session.live_engine.sleeps
    trainer.session.close()
    model = tiny_model(max_position_embeddings=1024)
    before = model.lm_head.weight.detach().clone()
    names["train"](model, tokenizer, [[[5, 6], [7, 8]]] * 2, loss)
    assert not before.equal(model.lm_head.weight)


def test_multi_turn(execute) -> None:
    """Tools and an environment, in a run each."""
    turns = ["an egg", '<tool_call>\n{"name": "tool", "arguments": {"text": "egg"}}\n</tool_call>']
    tokenizer = chat_tokenizer(turns)
    rows = [{"prompt": [{"role": "user", "content": ""}], "word": "egg", "riddle": f"door {i}"} for i in range(8)]
    settings = {
        "model": chatty_model(tokenizer, turns),
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(rows),
        "max_completion_length": 200,
        "vllm_max_model_length": 1200,
    }

    names = execute("docs/multi-turn.md", settings=settings, search=tool, calculate=tool)
    for trainer in names["trainers"]:
        trainer.train()
        assert trainer.session.rollout.name == "multi_turn"
        assert trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
        trainer.session.close()


def test_agents(execute) -> None:
    turns = ["an egg", "a plain answer"]
    tokenizer = chat_tokenizer(turns)
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "answer": "egg"} for i in range(8)]
    settings = {
        "model": chatty_model(tokenizer, turns),
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(rows),
        "max_completion_length": 60,
        "vllm_max_model_length": 400,
        "train": True,
    }
    trainer = execute("docs/agents.md", settings=settings)["trainer"]
    assert trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert 0 < trainer.state.log_history[0]["reward"] < 1


def test_trajectories(execute) -> None:
    shown = execute("docs/trajectories.md", settings={"train": True})
    readme = execute("plugins/trlx-hybrid-trajectories/README.md", settings={"train": True})
    assert Path("trajectories.jsonl").read_text().count("\n") == 2 * 8
    for trainer in (*shown["trainers"], *readme["trainers"]):
        trainer.session.close()


def test_report(execute) -> None:
    (trainer,) = execute("docs/report.md", settings={"train": True})["trainers"]
    trainer.session.close()
    recorded = {file.name for file in Path(trainer.args.output_dir, "report").iterdir()}
    assert recorded == {"rank0.jsonl", "trajectories.jsonl"}


def test_replay(execute) -> None:
    """Recorded, replayed, and sampled only."""
    recorded, replayed, sampled = execute("docs/replay.md", settings={"train": True})["trainers"]
    assert replayed.state.log_history[0]["loss"] == recorded.state.log_history[0]["loss"]
    assert sampled.state.log_history[0]["loss"] == 0.0
    names = ["recording/recording.json", "recording/rank0/train-000000-0.safetensors"]
    assert sorted(map(str, Path("recording").rglob("*.*"))) == sorted(names)


def test_scoring(execute) -> None:
    shown = execute("docs/scoring.md", settings={"train": True})
    readme = execute("plugins/trlx-hybrid-training/README.md", settings={"train": True})
    padded, *packed = trainers = [*shown["trainers"], *readme["trainers"]]
    assert padded.session.scoring.name == "padded"
    assert [t.session.scoring.name for t in packed] == ["packed"] * 2
    assert all(t.session.scoring.recomputation is not None and t.session.scoring.joins for t in packed)
    for trainer in trainers:
        trainer.session.close()


def test_algorithms(execute, run) -> None:
    """Those of the page, and the one that it shows how to write."""
    shown = execute("docs/algorithms.md", settings={"train": True})
    readme = execute("plugins/trlx-hybrid-algorithms/README.md", settings={"train": True})
    for trainer in (*shown["trainers"], *readme["trainers"]):
        assert trainer.session.algorithms.advantages_by == "leave_one_out"
        trainer.session.close()
    plugin = ModuleType("widest")
    plugin.trlx_register = shown["trlx_register"]
    trainer = run(trlx_hybrid.GRPOTrainer, hybrid={"algorithm": ["widest"]}, plugins=[plugin], max_steps=1).trainer
    assert trainer.session.metrics["hybrid/sampled_groups"] == 4
    assert trainer.session.metrics["hybrid/kept_groups"] >= 2


def test_cure(execute, tmp_path) -> None:
    from trl import GRPOConfig

    settings = {"per_device_train_batch_size": 16, "num_generations": 4, "shuffle_dataset": False}
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)
    shown = execute("docs/cure.md", settings=settings | {"train": True}, args=args)
    readme = execute("plugins/trlx-hybrid-cure/README.md", settings=settings | {"train": True}, rows=shown["rows"])
    for trainer in (*shown["trainers"], *readme["trainers"]):
        assert trainer.state.log_history[0]["cure/pass@1"] == 0  # a tiny model has nothing to say
        trainer.session.close()


def test_configuration(execute, monkeypatch) -> None:
    """The three ways say the same."""
    page = (ROOT / "docs/configuration.md").read_text()
    (flags,) = re.findall(r"python train\.py (--engine .*)", page)
    Path("run.yaml").write_text(textwrap.dedent(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]))
    configs = []
    for given in (shlex.split(flags), ["--config", "run.yaml"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *given, "--dataset_name", "data", "--use_cpu", "--bf16", "False"])
        names = execute("docs/configuration.md")
        configs += [names["hybrid_config"], names["trainers"][0].session.config]
    assert configs[0].engine_options == configs[2].engine_options == {"max_model_len": 2048}
    assert {(c.engine, c.weights, c.verify_every) for c in configs} == {("vllm", "copy", 50)}


def test_resharding(execute) -> None:
    execute("docs/resharding.md", model=tiny_model(), tokenizer=character_tokenizer(), optimizer=None)


def test_plugin_readmes(execute) -> None:
    tokenizer = chat_tokenizer(["no"])
    settings = {"model": chatty_model(tokenizer, ["no"]), "processing_class": tokenizer}
    execute("plugins/trlx-hybrid-multiturn/README.md", settings=settings, search=tool, run_tests=tool)
    execute("plugins/trlx-hybrid-vllm/README.md", settings={"model": tiny_model(max_position_embeddings=2048)})
    config = tiny_model(num_attention_heads=4, num_key_value_heads=4).config
    planned = execute("plugins/trlx-hybrid-reshard/README.md", config=config)["made"]
    assert planned.receives.sum() == planned.floor_bytes


def test_chat_templates(execute, tmp_path, tiny_tokenizer) -> None:
    """Of the trainer's tokenizer, and the check of one that is loaded, which reads its calls."""
    (tmp_path / "after.jinja").write_text((ROOT / "docs" / "chat-templates.md").read_text().split("```jinja")[2])
    found = execute("docs/chat-templates.md", tokenizer=tiny_tokenizer)
    assert "<think>" in found["trainers"][0].processing_class.chat_template
    ours = add_response_schema(chat_tokenizer([], "llama3_1"))
    ours.save_pretrained(tmp_path / "path" / "to" / "model")
    GenerationConfig(eos_token_id=ours.eos_token_id).save_pretrained(tmp_path / "path" / "to" / "model")
    found["test_conversations_go_on_token_for_token"]()


# --- Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine, pretending to have GPUs, for the pages that connect to one."""
    from trlx_hybrid_ray.cluster import connect

    with connect(cpus=64, gpus=10):
        yield


def test_engines(execute) -> None:
    """Up to the start of the engines, for which there are no GPUs."""
    (trainer,) = execute("docs/ray/engines.md")["trainers"]
    assert trainer.session.selection.engine.options.replicas == 2


def test_launching(execute, run) -> None:
    trainer = run(trlx_hybrid.GRPOTrainer, train=False, max_steps=1).trainer
    execute("docs/ray/launching.md", trainer=trainer, config=trainer.args)
    assert trainer.state.global_step == 1


def test_placement(execute, cluster) -> None:
    started = []

    class Trainer:
        @staticmethod
        def options(**given):
            started.append(given)
            return Trainer

        remote = staticmethod(lambda: None)

    names = execute(
        "docs/ray/placement.md", edits={'connect("10.0.0.1:6379")': "cluster()"}, cluster=nullcontext, Trainer=Trainer
    )
    assert len(names["trainers"]) == len(started) == 8


def test_worker_groups(execute, cluster) -> None:
    def load(model):
        return lambda prompts, temperature: [temperature * len(prompt) for prompt in prompts]

    edits = {"connect()": "cluster()", "WorkerGroup(Scorer, 4,": "WorkerGroup(Scorer, 2,"}
    given = {"load": load, "prompts": ["a", "bb", "ccc"], "Tensor": Any, "Any": Any, "cluster": nullcontext}
    names = execute("docs/ray/worker-groups.md", edits=edits, **given)
    assert names["scores"] == pytest.approx([0.7, 1.4, 2.1])


def test_remote(execute, cluster) -> None:
    """With fewer workers, and a function in the place of the judge."""

    def runs_the_tests(completions, **_):
        return [1.0 for _ in completions]

    class Sandbox:
        def reset(self, **row):
            return "ready"

        def run(self, code: str) -> str:
            """Run it.

            Args:
                code: what.
            """
            return code

    edits = {"workers=8": "workers=1", "workers=16": "workers=1", '"my-org/judge-0.6b", gpus=0.5': "runs_the_tests"}
    tokenizer = chat_tokenizer(["no"])
    settings = {"model": chatty_model(tokenizer, ["no"]), "processing_class": tokenizer}
    execute("docs/ray/remote.md", edits=edits, settings=settings, runs_the_tests=runs_the_tests, Sandbox=Sandbox)
