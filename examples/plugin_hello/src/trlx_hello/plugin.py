"""A plugin that says hello when a run starts, and prints what each rollout cost and earned."""

from trlx_hybrid import hookimpl


@hookimpl
def trlx_report_header(session):
    """Return one line for below the run's header."""
    return f"hello: watching {session.ranks.world} rank(s)"


@hookimpl
def trlx_rollout_end(trajectories):
    """Print the rollout's tokens and mean reward. A hook may take fewer arguments than its spec lists."""
    tokens = sum(len(t.completion_ids) for t in trajectories)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    print(f"hello: {len(trajectories)} trajectories, {tokens} tokens, reward {mean:.3f}")
