"""CURE on a CPU in minutes: one small model learns to write programs, and the unit tests that judge them.

    accelerate launch examples/coder_and_tester.py

What happens, in this order:

1. A small Qwen3 is trained from scratch on demonstrations: programs for a described function, and unit tests of it.
   Only some of both are right.
2. GRPO with `CureReward`: for each function the model is asked for programs and for tests. A sandbox runs all programs
   on all tests, and both earn their reward from the results. The reward knows ground-truth tests, but no right program.
3. Functions that the model never saw are scored before and after: the share of right programs, and of tests that hold.

It shows that reinforcement learning selects among behaviours that were demonstrated. The language is tiny, so that a
small model can write it: a program is an expression of `x`, and a test says what one `x` gives.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from quickstart import demonstration_config, plot_rewards, quiet, train
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toy_chat import ToyConfig
from toy_task import build_model
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed
from trl import SFTTrainer, TrlParser
from trlx_hybrid import GRPOTrainer
from trlx_hybrid_cure import CureReward, Sandbox, two_speakers
from trlx_hybrid_cure.sandbox import ProgramTests

Task = dict[str, str | list[str]]  # the question, a right program, and ground-truth tests

ASKS = {"program": "Program: ", "test": "Test: "}
WORDS = ("times ", "plus ", "minus ", "before ", "after ", *ASKS.values())
LETTERS = "abcdefgh"


@dataclass
class ScriptArguments:
    """The settings of the toy. `GRPOConfig`'s own flags set the GRPO run itself."""

    num_heldout: int = field(default=64, metadata={"help": "Functions kept out of all training, for the scores."})
    share_right: float = field(default=0.35, metadata={"help": "Fraction (0 to 1) of correct demonstrations."})
    sft_steps: int = field(default=400, metadata={"help": "SFT steps on demonstrations (batch size 64)."})


@dataclass
class CureConfig(ToyConfig):
    """The toy's defaults, with those that CURE needs."""

    output_dir: str = field(default="runs/coder_and_tester", metadata={"help": "The run folder."})
    max_steps: int = field(default=60, metadata={"help": "GRPO steps."})
    per_device_train_batch_size: int = field(default=256, metadata={"help": "Programs and tests per step."})
    num_generations: int = field(default=16, metadata={"help": "Programs, and tests, per function and step."})
    max_completion_length: int = field(default=16, metadata={"help": "Tokens of a program or a test."})
    shuffle_dataset: bool = field(default=False, metadata={"help": "Programs and tests of a function stay together."})


def draw_input(task: Task, rng: random.Random) -> str:
    """Draw an argument for the task's function, as Python writes it."""
    return repr("".join(rng.choices(LETTERS, k=2))) if "'" in task["program"] else str(rng.randrange(10))


def write_test(task: Task, rng: random.Random) -> str:
    """Write a test that holds."""
    given = draw_input(task, rng)
    return f"f({given})=={eval(task['program'], {'x': eval(given)})!r}"


def all_tasks() -> list[Task]:
    """Return functions of numbers and of strings, with four ground-truth tests each."""
    numbers = [
        {"asked": f"times {a} {name} {b}\n", "program": f"x*{a}{sign}{b}"}
        for a in range(2, 10)
        for name, sign in (("plus", "+"), ("minus", "-"))
        for b in range(1, 10)
    ]
    strings = [
        {"asked": f"{name} {a}{b}\n", "program": f"'{a}{b}'+x" if name == "before" else f"x+'{a}{b}'"}
        for name in ("before", "after")
        for a in LETTERS
        for b in LETTERS
    ]
    rng = random.Random(0)
    return [task | {"tests": [source_of_test(write_test(task, rng)) for _ in range(4)]} for task in numbers + strings]


def source_of_program(text: str) -> str:
    """Return the coder's text as Python."""
    return f"f = lambda x: {text}"


def source_of_test(text: str) -> str:
    """Return the tester's text as Python."""
    return f"assert {text}"


def demonstrate(task: Task, speaker: str, share_right: float, rng: random.Random) -> str:
    """Write a program or a test, right with probability `share_right`, else with another letter or digit in it."""
    text = task["program"] if speaker == "program" else write_test(task, rng)
    if rng.random() < share_right:
        return text
    start = text.find("==") + 1  # in a test, the mistake is in the result
    place = rng.choice([i for i, character in enumerate(text) if i >= start and character in LETTERS + "0123456789"])
    others = set(LETTERS if text[place] in LETTERS else "0123456789") - {text[place]}
    return text[:place] + rng.choice(sorted(others)) + text[place + 1 :]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, and one for each word of the prompts."""
    characters = "\n " + LETTERS + "0123456789" + "x+-*'()="
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(["<pad>", "<eos>", *WORDS, *characters])})
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*WORDS, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def learn_from_demonstrations(
    script: ScriptArguments, config: CureConfig, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]
) -> Qwen3ForCausalLM:
    """Train the small model from scratch with TRL's SFTTrainer, on programs and tests alike."""
    set_seed(config.seed)
    rng = random.Random(config.seed)
    folder = f"{config.output_dir}/demonstrated"
    sft = demonstration_config(folder, script.sft_steps, config.seed, use_cpu=config.use_cpu)
    rows = []
    for _ in range(sft.max_steps * sft.per_device_train_batch_size):
        task, speaker = rng.choice(tasks), rng.choice(list(ASKS))
        said = demonstrate(task, speaker, script.share_right, rng)
        rows.append({"prompt": ASKS[speaker] + task["asked"], "completion": said})
    model = build_model(tokenizer, config.vllm_max_model_length)
    trainer = SFTTrainer(model, sft, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    train(trainer, f"Learning from demonstrations, {script.share_right:.0%} of them right", metric="loss")
    return model


@torch.inference_mode()
def scores(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> tuple[float, float]:
    """Return the shares of right programs and of right tests, of four of each per task, sampled at temperature 1."""
    set_seed(0)
    said = {}
    for speaker, ask in ASKS.items():
        inputs = tokenizer([ask + task["asked"] for task in tasks for _ in range(4)], padding=True, return_tensors="pt")
        output = model.eval().generate(**inputs.to(model.device), max_new_tokens=16, do_sample=True, temperature=1.0)
        said[speaker] = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    fourfold = [task for task in tasks for _ in range(4)]
    programs = [
        ProgramTests(source_of_program(text), task["tests"])
        for task, text in zip(fourfold, said["program"], strict=True)
    ]
    tests = [
        ProgramTests(source_of_program(task["program"]), [source_of_test(text)])
        for task, text in zip(fourfold, said["test"], strict=True)
    ]
    right = [set(verdicts) == {"passed"} for verdicts in Sandbox().run([*programs, *tests])]
    return sum(right[: len(programs)]) / len(programs), sum(right[len(programs) :]) / len(tests)


def main() -> None:
    """Learn from demonstrations, score, train with CURE, score again."""
    script, config = TrlParser((ScriptArguments, CureConfig)).parse_args_and_config()
    quiet()
    tasks = all_tasks()
    random.Random(config.seed).shuffle(tasks)
    heldout, training = tasks[: script.num_heldout], tasks[script.num_heldout :]

    tokenizer = build_tokenizer()
    model = learn_from_demonstrations(script, config, tokenizer, training)
    before = scores(model, tokenizer, heldout)

    asked = Dataset.from_list([{name: task[name] for name in ("asked", "tests")} for task in training])
    reward = CureReward(program=source_of_program, test=source_of_test)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=two_speakers(
            asked,
            config,
            coder=lambda row: ASKS["program"] + row["asked"],
            tester=lambda row: ASKS["test"] + row["asked"],
        ),
        processing_class=tokenizer,
    )
    title = f"CURE, {config.max_steps} steps of {config.per_device_train_batch_size} programs and tests"
    train(trainer, f"{title}, behind {reward.sandbox.using}", metric="cure/pass@1")
    trainer.save_model()
    after = scores(trainer.model, tokenizer, heldout)
    plot_rewards(
        [float(log["reward"]) for log in trainer.state.log_history if "reward" in log],
        Path(config.output_dir) / "reward.png",
    )

    print(f"\n{len(heldout)} held-out functions, sampled at temperature 1\n")
    print(f"                   {'before CURE':>12}{'after CURE':>12}")
    for name, old, new in zip(("right programs", "tests that hold"), before, after, strict=True):
        print(f"  {name:<17}{old:>12.1%}{new:>12.1%}")
    print(f"\nRun folder: {config.output_dir}  (model, reward.png)")


if __name__ == "__main__":
    main()
