"""GRPO by hand, with one controller: this process runs the loop, groups of Ray actors do the work. On a CPU in minutes.

    python examples/ray_single_controller.py
    python examples/ray_single_controller.py --placement split
    python examples/ray_single_controller.py --address 10.0.0.1:6379 --workers 8

The task is the quickstart's: spell a word backward, beginning with a model that saw demonstrations of which few are
right. There are three groups, and `train` below is the whole program:

- actors: the policy, sharded over them by FSDP2; each samples from it with a vLLM of its own (`HybridEngine`).
- references: the policy as it was at the start, for the KL penalty.
- rewards: reasoning-gym's verification.

Colocated, worker r of all groups shares GPU r, and takes turns; split, each has a GPU of its own. On several nodes,
keep `--cache_dir` and `--output_dir` on a shared file system.
"""

import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import ray
import torch
from quickstart import ScriptArguments, demonstrated_policy, quiet
from torch.distributed.fsdp import fully_shard
from toy_task import draw_tasks, is_right, prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trlx_hybrid import HybridEngine
from trlx_hybrid_ray.cluster import connect
from trlx_hybrid_ray.placement import PlacementRequest, reserve
from trlx_hybrid_ray.worker_group import WorkerGroup, register, this_worker


@dataclass
class Arguments:
    """The arguments of this script, besides those of the demonstrations."""

    placement: Literal["colocated", "split"] = field(
        default="colocated", metadata={"help": "'colocated': the groups share GPUs; 'split': each has its own."}
    )
    workers: int = field(default=2, metadata={"help": "Workers of each group."})
    address: str = field(default="local", metadata={"help": "Ray cluster to join, host:port; 'local' starts one."})
    output_dir: str = field(
        default="runs/ray_single_controller", metadata={"help": "Where the trained model is saved."}
    )
    steps: int = field(default=40, metadata={"help": "GRPO steps."})
    num_prompts: int = field(default=32, metadata={"help": "Prompts per step."})
    num_generations: int = field(default=8, metadata={"help": "Answers per prompt."})
    max_prompt: int = field(default=8, metadata={"help": "Longest prompt, in tokens."})
    max_tokens: int = field(default=8, metadata={"help": "Longest answer, in tokens."})
    micro_batch_size: int = field(default=64, metadata={"help": "Sequences per forward and backward pass."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate; decays linearly to zero."})
    clip: float = field(default=0.2, metadata={"help": "Clip range of the probability ratio, PPO's epsilon."})
    beta: float = field(default=0.02, metadata={"help": "Weight of the KL penalty."})
    seed: int = field(default=0, metadata={"help": "Seed of tasks, models and sampling."})


def train(args, tasks, actors, references, rewards):
    """Run the controller's loop. Rollouts go from worker to worker; only token ids and numbers pass through here."""
    rng = random.Random(args.seed)
    for step in range(args.steps):
        batch = [task for task in rng.sample(tasks, args.num_prompts) for _ in range(args.num_generations)]
        rollout = actors.generate(batch)  # a future; references and rewards get it from the actors
        reference = references.log_probs(rollout)
        scores = rewards.score(rollout)

        score = torch.tensor(scores.result()).view(-1, args.num_generations)
        advantage = (score - score.mean(1, keepdim=True)) / (score.std(1, keepdim=True) + 1e-4)
        experience = rollout.result() | {"reference": reference.result(), "advantage": advantage.flatten()}
        metrics = actors.update(experience, learning_rate=args.learning_rate * (1 - step / args.steps))
        print(f"step {step}: reward {score.mean():.3f}, kl {metrics['kl']:.4f}, loss {metrics['loss']:.4f}", flush=True)


def evaluate(tasks, actors, rewards):
    """Return the share of held-out tasks answered right, sampled at temperature 1."""
    scores = rewards.score(actors.generate(tasks, training=False)).result()
    return sum(scores) / len(scores)


class Actor:
    """A rank of the policy, with an engine that samples from it."""

    def __init__(self, model_dir, args):
        this_worker().init_process_group()
        self.args, self.tokenizer, self.model = args, AutoTokenizer.from_pretrained(model_dir), loaded(model_dir)
        for module in (*self.model.model.layers, self.model):
            fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        self.engine = HybridEngine(
            self.model,
            self.tokenizer,
            self.optimizer,
            max_tokens=args.max_tokens,
            engine_options={"enable_sleep_mode": True, "max_model_len": args.max_prompt + args.max_tokens},
            seed=args.seed,
        )

    @register(dispatch="scatter", execute="future")
    def generate(self, tasks, training=True):
        """Sample one answer to each task; return its tokens with their log-probs."""
        prompts = [self.tokenizer(prompt(task))["input_ids"] for task in tasks]
        with self.engine.rollout_context(training):
            completions = self.engine.generate(prompts)
        answers = [completion.token_ids for completion in completions]
        length, width = self.args.max_prompt, self.args.max_tokens
        pad = self.tokenizer.pad_token_id
        prompts = [[pad] * (length - len(ids)) + ids for ids in prompts]
        return {
            "task": tasks,
            "text": self.tokenizer.batch_decode(answers, skip_special_tokens=True),
            "ids": torch.tensor([p + a + [pad] * (width - len(a)) for p, a in zip(prompts, answers, strict=True)]),
            "answered": torch.tensor([[1.0] * len(a) + [0.0] * (width - len(a)) for a in answers]),
            "sampled": torch.tensor(
                [[of[0] for of in c.logprobs] + [0.0] * (width - len(c.logprobs)) for c in completions]
            ),
        }

    @register(dispatch="scatter")
    def update(self, experience, learning_rate):
        """Take one optimizer step on all actors' experience: GRPO's clipped objective, and the KL penalty."""
        batches = micro_batches(experience, self.args)
        metrics = torch.zeros(2)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with self.engine.train_context():
            for batch in batches:
                scores = log_probs(self.model, batch)
                answered, advantage = batch["answered"], batch["advantage"][:, None]
                ratio = (scores - batch["sampled"]).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(1 - self.args.clip, 1 + self.args.clip) * advantage)
                gap = batch["reference"] - scores
                kl = gap.exp() - gap - 1  # http://joschu.net/blog/kl-approx.html, k3
                per_answer = ((self.args.beta * kl - gain) * answered).sum(1) / answered.sum(1)
                loss = per_answer.mean() / len(batches)
                loss.backward()
                metrics += torch.stack([loss, (kl * answered).sum() / answered.sum() / len(batches)]).detach().cpu()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.distributed.all_reduce(metrics)  # so all actors return the same values, which become one
        loss, kl = (metrics / this_worker().world).tolist()
        return {"loss": loss, "kl": kl}

    @register(dispatch="broadcast")
    def save(self, folder):
        """Gather the shards of all ranks; rank 0 writes the model."""
        weights = {name: tensor.full_tensor().cpu() for name, tensor in self.model.state_dict().items()}
        if this_worker().rank == 0:
            self.model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)


class Reference:
    """The policy as it was before training."""

    def __init__(self, model_dir, args):
        self.args, self.model = args, loaded(model_dir)

    @register(dispatch="scatter", execute="future")
    @torch.no_grad()
    def log_probs(self, rollout):
        """Return the log-probs of the answers' tokens, (rows, max_tokens)."""
        return torch.cat([log_probs(self.model, batch).cpu() for batch in micro_batches(rollout, self.args)])


class Reward:
    """A verifier: 1 for a right answer, else 0."""

    @register(dispatch="scatter", execute="future")
    def score(self, rollout):
        """Return one reward per row."""
        return [float(is_right(*pair)) for pair in zip(rollout["task"], rollout["text"], strict=True)]


def loaded(model_dir):
    """Load the model onto this worker's device."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def micro_batches(batch, args):
    """Return the batch's tensors in parts of `micro_batch_size` rows, on this worker's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: value.to(device) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    starts = range(0, len(batch["ids"]), args.micro_batch_size)
    return [{name: value[at : at + args.micro_batch_size] for name, value in tensors.items()} for at in starts]


def log_probs(model, batch):
    """Return the log-probability of each token of the answers, (rows, max_tokens)."""
    ids, width = batch["ids"], batch["answered"].shape[1]
    attended = torch.cat([ids[:, :-width] != model.config.pad_token_id, batch["answered"] > 0], dim=1)
    logits = model(input_ids=ids, attention_mask=attended.long(), use_cache=False).logits[:, -width - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, -width:, None])[..., 0]


SHARES = {"actors": 0.5, "references": 0.5, "rewards": 0.0}
"""The share of a GPU per worker where groups are colocated; if split, a worker with a share gets a whole GPU."""


@contextmanager
def placed(args):
    """Yield where the workers of each group go. All are reserved at once, or refused with a table of what is free."""
    gpu = int(ray.cluster_resources().get("GPU", 0) > 0)
    with ExitStack() as stack:
        if args.placement == "colocated":
            request = PlacementRequest(name="colocated", replicas=args.workers, cpus=len(SHARES), gpus=gpu)
            places = stack.enter_context(reserve(request, show=print))
            ranks = [places.options(rank) for rank in range(len(places))]
            shares = {name: {"num_cpus": 1, "num_gpus": share * gpu} for name, share in SHARES.items()}
            yield {name: [options | share for options in ranks] for name, share in shares.items()}
        else:
            requests = [PlacementRequest(name=n, replicas=args.workers, gpus=gpu * (s > 0)) for n, s in SHARES.items()]
            yield {request.name: stack.enter_context(reserve(request, show=print)) for request in requests}


def main():
    """Learn from demonstrations, measure, train with GRPO, measure again."""
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    quiet()
    tasks = draw_tasks(script.num_heldout + script.num_tasks, args.seed)
    heldout, training = tasks[: script.num_heldout], tasks[script.num_heldout :]
    given = (str(demonstrated_policy(script, training, args.seed).resolve()), args)
    local = {"cpus": len(SHARES) * args.workers} if args.address == "local" else {}
    with (
        connect(args.address, **local),
        placed(args) as places,
        WorkerGroup(Actor, places["actors"], given, start_deadline=600) as actors,  # they load a model
        WorkerGroup(Reference, places["references"], given, start_deadline=600) as references,
        WorkerGroup(Reward, places["rewards"]) as rewards,
    ):
        before = evaluate(heldout, actors, rewards)
        train(args, training, actors, references, rewards)
        after = evaluate(heldout, actors, rewards)
        actors.save(args.output_dir)
    print(f"{len(heldout)} held-out words: {before:.1%} right before GRPO, {after:.1%} after. Model: {args.output_dir}")


if __name__ == "__main__":
    main()
