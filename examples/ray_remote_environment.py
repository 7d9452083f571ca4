"""The guessing game of `guessing_game.py`, with the games in Ray actors: two processes, 128 games at once.

    python examples/ray_remote_environment.py
    RAY_ADDRESS=auto python examples/ray_remote_environment.py      # on a running cluster

`episodes(GuessingGame)` becomes `episodes(remote_environment(GuessingGame))`; nothing else changes, the games included.
The games of a process that dies are lost: their trajectories are masked and counted, and the run goes on.
"""

from guessing_game import GuessingGame, main
from trlx_hybrid_multiturn import episodes
from trlx_hybrid_ray.remote import remote_environment


def in_actors(game: type[GuessingGame], **settings: object) -> object:
    """Return `episodes` of games that run in Ray actors."""
    return episodes(remote_environment(game, workers=2, per_worker=64), **settings)


if __name__ == "__main__":
    main(in_actors, "runs/ray_remote_environment")
