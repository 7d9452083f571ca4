"""A task that a tiny model learns on two CPU cores: spell a word backward.

The tasks and their verification are reasoning-gym's. The demonstrations are made here and are only partly right, so
that reinforcement learning has something to correct.
"""

import random
import re
from typing import Any

from reasoning_gym import create_dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Task = dict[str, Any]  # one reasoning-gym entry: question, answer, metadata

INSTRUCTION = "Spell this word backward (example: sun -> nus): "
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
GYM = create_dataset("spell_backward", min_word_len=4, max_word_len=5, size=10**6, seed=0)


def draw_tasks(count: int, seed: int) -> list[Task]:
    """Draw `count` tasks, each with another word.

    reasoning-gym repeats words, under other seeds too. So two draws may overlap; take slices of one draw to keep
    held-out words out of training.
    """
    rng = random.Random(seed)
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        task = GYM[rng.randrange(len(GYM))]
        word = task["metadata"]["word"]
        if word.islower():  # reasoning-gym's verification ignores case, so capitals would only widen the vocabulary
            tasks.setdefault(word, task)
    return list(tasks.values())


def prompt(task: Task) -> str:
    """Return reasoning-gym's question, with a newline that marks where the word ends."""
    return task["question"] + "\n"


def demonstrate(task: Task, share_right: float, rng: random.Random) -> str:
    """Answer right with probability `share_right`, else leave the last two letters in the wrong order."""
    answer: str = task["answer"]
    return answer if rng.random() < share_right else answer[:-2] + answer[-1] + answer[-2]


def is_right(task: Task, answer: str) -> bool:
    """Return whether reasoning-gym accepts the answer in full, without its partial credit for single letters in place.

    Partial credit would give a wrong demonstration three fifths, and hide most of what is learned.
    """
    return bool(GYM.score_answer(answer, task) == 1.0)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per letter, and one for the instruction, which saves most of the run."""
    tokens = ["<pad>", "<eos>", INSTRUCTION, "\n", *ALPHABET]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{re.escape(INSTRUCTION)}|[a-z\n]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, max_length: int = 64) -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.6 million parameters, with random weights, for texts of up to `max_length` tokens."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        initializer_range=0.04,  # the usual 0.02 suits wider models; here it only delays learning
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)
