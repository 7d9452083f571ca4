"""Files of recorded trajectories for tests, written as a run writes them."""

from trlx_hybrid_trajectories.record import OptionalLines, lines_of


def append(path, trajectories, tokenizer, *, step, limit=None, training=True):
    """Append the first `limit` trajectories to a file, and return how many were written."""
    lines = lines_of(trajectories, tokenizer, step=step, limit=limit, training=training)
    if lines:
        add_lines(path, lines)
    return len(lines)


def add_lines(path, lines):
    file = OptionalLines(path, "Lines of a test")
    file.add(lines)
    file.close()
