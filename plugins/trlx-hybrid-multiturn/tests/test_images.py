"""Tools and environments that answer with pictures."""

import copy
import io
import itertools
from base64 import b64encode

import pytest
import trlx_hybrid
from datasets import Dataset
from openai import BadRequestError
from trl import GRPOConfig
from trlx_hybrid.contract.conversation import images_of
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.models import MARKS, character_tokenizer, tiny_grpo, tiny_model
from trlx_hybrid_multiturn import Step, episode_reward, episodes
from trlx_hybrid_multiturn.gateway import agents
from trlx_hybrid_multiturn.tokens import TemplateTokens

from tests.support.agents import CLIENT
from tests.support.vision import chatty_vision_model, picture

NEEDED = "the processors of vision-language models need torchvision"
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": %d}}\n</tool_call>'
TURNS = [CALL % 1, CALL % 3, "that is all"]
GAP = 1e-5  # nats; another picture changes a log-prob by 0.01
QUESTIONS = [[{"role": "user", "content": f"what is {number * 37}?"}] for number in range(16)]


def look(n: int) -> list:
    """Look.

    Args:
        n: how many squares to see.
    """
    return [{"type": "image", "image": picture("qwen3_vl", n)}, {"type": "text", "text": "so many"}]


class Gallery:
    """Shows a picture at first and one for each call, and gives a point for each."""

    def reset(self, row):
        self.shown = row["first"]
        return [{"role": "user", "content": look(self.shown)}] if self.shown else "look around."

    def step(self, completion):
        n = next((n for n in (1, 3) if CALL % n in completion), None)
        if n is None:
            return Step(done=True)
        self.shown += n
        return Step(observation=[{"role": "user", "content": look(n)}], reward=1.0 + self.shown)


def trained(folder, rollout="multi_turn", **arguments):
    """(what each rollout generated, logs) of two steps."""
    pytest.importorskip("torchvision", reason=NEEDED)
    model, processor = arguments.pop("seen_by", None) or chatty_vision_model(TURNS)
    batches = []

    class Recording(trlx_hybrid.GRPOTrainer):
        def _generate(self, prompts):
            batches.append(copy.copy(super()._generate(prompts)))
            return batches[-1]

    settings = {"max_completion_length": 300, "max_tool_calling_iterations": 3, "max_steps": 2, "learning_rate": 1e-4}
    # TRL's default weighs a row by all its tokens at once: the rounding of up to 300 log-probs, which differs by batch
    settings["vllm_importance_sampling_mode"] = "token_mask"
    given = {
        "reward_funcs": lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        "train_dataset": Dataset.from_dict({"prompt": QUESTIONS}),
        "args": GRPOConfig(**tiny_grpo(folder, **settings | {"vllm_max_model_length": 2048})),
        "hybrid": {"rollout": rollout},
    }
    trainer = Recording(model=model, processing_class=processor, **given | arguments)
    try:
        trainer.train()
        assert trainer.session.rollout.name == rollout
        return batches, [log for log in trainer.state.log_history if "loss" in log]
    finally:
        trainer.session.close()


def test_pictures_from_tools_are_those_of_trls_loop(tmp_path):
    """Same tokens, same masks, same pictures, and the engine saw them as the loss does."""
    ours, logs = trained(tmp_path / "ours", "multi_turn", tools=[look])
    theirs, others = trained(tmp_path / "theirs", "single_turn", tools=[look])
    for mine, other in zip(ours, theirs, strict=True):
        prompt_ids, completion_ids, mask, *_, images = zip(mine, other, strict=True)
        for pair in (prompt_ids, completion_ids, mask, images):
            assert pair[0] == pair[1]
    seen = [len(images or []) for batch in ours for images in batch[-1]]
    assert len(set(seen)) > 2
    assert sum(seen) > 8
    for mine, other in zip(logs, others, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["sampling/sampling_logp_difference/max"] < 1e-5


def calmer():
    """A model that samples these turns from logits half as large, and so is their rounding. Tokens that stand for
    pictures, which the engine leaves out and TRL's loss does not, stay so improbable that this is not seen."""
    model, processor = chatty_vision_model(TURNS)
    head = model.get_output_embeddings().weight.data
    head *= 0.5
    head[processor.tokenizer.convert_tokens_to_ids(list(MARKS.values())), 0] = -90
    return model, processor


def gallery(first, **columns):
    """Arguments of a trainer whose episodes show so many squares at first."""
    pytest.importorskip("torchvision", reason=NEEDED)
    return {
        "seen_by": calmer(),
        "rollout_func": episodes(Gallery, max_turns=4),
        "reward_funcs": episode_reward,
        "train_dataset": Dataset.from_dict({"prompt": QUESTIONS, "first": first} | columns),
    }


def test_pictures_that_an_environment_shows_reach_the_engine_and_the_loss(tmp_path):
    """In the dataset's prompt, from `reset` and from `step`; some conversations have none after the prompt."""
    pytest.importorskip("torchvision", reason=NEEDED)
    pictures = [picture("qwen3_vl", number % 5, number) for number in range(16)]
    pixels = [image.tobytes() for image in pictures]
    batches, logs = trained(tmp_path, **gallery([0, 2, 5, 7] * 4, image=pictures))
    assert len(logs) == 2
    counts = set()
    for _, _, masks, *_, fields, images, _ in batches:
        assert fields["images"] == images
        for mask, seen, messages, reward in zip(
            masks, images, fields["episode_messages"], fields["episode_reward"], strict=True
        ):
            shown = images_of(messages)
            assert seen[0].tobytes() in pixels  # the prompt's
            assert seen[len(seen) - len(shown) :] == shown  # then what reset showed, then what followed
            assert len(seen) - len(shown) in (1, 2)
            assert mask.count(0) >= 5 * len(shown)  # nothing that was shown is learned, four tokens to an image
            assert (reward is None) == (not shown)
            counts.add(len(seen))
    assert len(counts) > 2
    for log in logs:
        assert log["hybrid/trajectories/failed"] == 0
        assert log["sampling/sampling_logp_difference/max"] < GAP
        assert log["grad_norm"] > 0


def test_a_batch_of_rounds_has_the_pictures_of_its_rows(tmp_path):
    batches, logs = trained(
        tmp_path, hybrid={"rollout": "multi_turn", "algorithm": "dynamic_sampling"}, **gallery([0, 2, 5, 7] * 4)
    )
    assert max(log["hybrid/rounds"] for log in logs) > 1
    assert all(log["sampling/sampling_logp_difference/max"] < GAP for log in logs)
    assert any(images for batch in batches for images in batch[-1])


def test_prompts_of_episodes_are_encoded_as_trl_does():
    pytest.importorskip("torchvision", reason=NEEDED)
    _, processor = chatty_vision_model(TURNS)
    tokens = TemplateTokens(processor)
    prompt = [{"role": "user", "content": look(3)}, {"role": "user", "content": [{"type": "text", "text": "so?"}]}]
    (expected,) = processor.apply_chat_template([prompt], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokens.prompt(prompt) == expected
    assert tokens.observation(prompt)[-len(expected) :] == expected
    assert expected.count(processor.image_token_id) == 4


def test_rows_without_pictures_lie_beside_rows_with_some_in_any_micro_batch(tmp_path):
    """Micro-batches of two of sixteen rows: some have no picture at all, and the tower is not asked."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_completion_length": 300}
    settings |= {"max_steps": 2, "vllm_max_model_length": 2048, "vllm_importance_sampling_mode": "token_mask"}
    batches, logs = trained(
        tmp_path, args=GRPOConfig(**tiny_grpo(tmp_path, **settings)), **gallery([0] * 12 + [5, 7] * 2)
    )
    assert any(not row for batch in batches for row in batch[-1])
    assert any(row for batch in batches for row in batch[-1])
    for log in logs:
        assert log["sampling/sampling_logp_difference/max"] < GAP
        assert log["grad_norm"] > 0


def test_pictures_that_trls_loss_would_not_take_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("torchvision", reason=NEEDED)

    def pictured(prompts, trainer):
        return {name: [[1, 2]] * len(prompts) for name in ("prompt_ids", "completion_ids", "logprobs")} | {
            "images": [[picture("qwen3_vl", 3)]] * len(prompts)
        }

    with pytest.raises(ConfigError, match="the trainer has tools, which may answer with others"):
        trained(tmp_path, "single_turn", rollout_func=pictured, tools=[look])
    model, processor = chatty_vision_model(TURNS)
    monkeypatch.setattr(type(processor.image_processor), "model_input_names", ["pixel_values"])
    with pytest.raises(ConfigError, match=r"does not say where each one lies \(image_grid_thw"):
        trained(tmp_path, rollout_func=pictured, seen_by=(model, processor))


def test_a_text_model_leaves_the_field_to_reward_functions(tmp_path):
    """As in TRL, where a `rollout_func` may return any column."""

    def pictured(prompts, trainer):
        sampled = [[1, 2 + i % 3] for i in range(len(prompts))]
        told = {"prompt_ids": sampled, "completion_ids": sampled, "logprobs": [[-1.0, -1.0]] * len(prompts)}
        return told | {"images": [f"shot{i}.png" for i in range(len(prompts))]}

    seen = []

    def reward(completion_ids, images, **_):
        seen.extend(images)
        return [float(sum(ids)) for ids in completion_ids]

    text = (tiny_model(max_position_embeddings=2048), character_tokenizer())
    trained(tmp_path, rollout_func=pictured, seen_by=text, reward_funcs=reward)
    assert seen[0] == "shot0.png"


class Shows(Gallery):
    """Adds nothing to the dataset's prompt, which has a picture."""

    def reset(self, row):
        self.shown = 0


def sent(messages):
    """As an API takes them, with pictures in base64."""

    def part(block):
        if block["type"] == "text":
            return block
        block["image"].save(file := io.BytesIO(), "png")
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"},
        }

    return [{**m, "content": [part(block) for block in m["content"]]} for m in messages]


async def visits(base_url, row):
    """The agent that says what `Shows` shows."""
    client, gallery, reward = CLIENT.with_options(base_url=base_url), Shows(), None
    gallery.reset(row)
    asked = [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["prompt"][0]["content"]}]
    messages = sent([{"role": "user", "content": asked}])
    for _ in range(4):
        try:
            done = await client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            break
        text = done.choices[0].message.content or ""
        step = gallery.step(text)
        if step.reward is not None:
            reward = (reward or 0.0) + step.reward
        if step.done:
            break
        messages += [{"role": "assistant", "content": text}, *sent(step.observation)]
    return reward


def test_pictures_that_an_agent_sends_reach_the_engine_and_the_loss(tmp_path):
    """The same tokens, masks and pictures as those of an environment."""
    pictures = [picture("qwen3_vl", number % 5, number) for number in range(16)]
    found = []
    for rollout in (episodes(Shows, max_turns=4), agents(visits, max_turns=4)):
        given = gallery([0] * 16, image=pictures) | {"rollout_func": rollout}
        batches, logs = trained(tmp_path / str(len(found)), **given)
        assert all(log["hybrid/trajectories/failed"] == 0 for log in logs)
        assert all(log["sampling/sampling_logp_difference/max"] < GAP for log in logs)
        found.append(batches[0])
    for (ids, images), (others, seen) in zip(*(zip(zip(*batch[:3]), batch[-2]) for batch in found), strict=True):
        assert ids == others
        assert [image.tobytes() for image in images] == [image.convert("RGB").tobytes() for image in seen]
    assert len({len(images) for images in found[1][-2]}) > 1


def test_an_agent_that_fails_leaves_the_picture_of_its_prompt(tmp_path):
    """Its row is masked, and is scored with the others."""
    calls = itertools.count()

    async def fails(base_url, row):
        if next(calls) % 2:
            raise ValueError("no")
        return await visits(base_url, row)

    pictures = [picture("qwen3_vl", number % 5, number) for number in range(16)]
    given = gallery([0] * 16, image=pictures) | {"rollout_func": agents(fails, max_turns=2)}
    given["hybrid"] = {"rollout": "multi_turn", "rollout_options": {"max_failed": 1.0}}
    batches, logs = trained(tmp_path, **given)
    assert [log["hybrid/trajectories/failed"] for log in logs] == [4, 4]
    for *_, images, _ in batches:
        assert all(len(seen) >= 1 for seen in images)
    assert all(log["sampling/sampling_logp_difference/max"] < GAP for log in logs)
