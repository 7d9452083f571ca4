"""A plugin that says hello when a run starts, and prints what each rollout cost and earned."""

from trlx_hybrid import hookimpl


@hookimpl
def trlx_report_header(session):
    """Return one line for below the run's header."""
    return f"hello: watching {session.ranks.world} rank(s)"


@hookimpl
def trlx_rollout_end(session, trajectories):
    """Print the tokens and the mean reward of the rollout of all ranks, once.

    Every rank calls a hook, with its own rows. `gather` is collective, so it stands before the `if`.
    """
    rows = [(len(t.completion_ids), t.reward) for t in trajectories]
    rows = [row for of_rank in session.ranks.gather(rows) for row in of_rank]
    if session.ranks.rank == 0:
        rewards = [reward for _, reward in rows if reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else float("nan")
        print(f"hello: {len(rows)} trajectories, {sum(tokens for tokens, _ in rows)} tokens, reward {mean:.3f}")
