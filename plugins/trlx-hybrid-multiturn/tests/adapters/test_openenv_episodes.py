"""Episodes in a real OpenEnv server: over its websocket, and through its own client."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from openenv.core import GenericEnvClient
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_multiturn.adapters.openenv import from_openenv

SERVER = Path(__file__).parent / "openenv_game.py"
START = 60  # seconds a server may take to come up


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def serve():
    """Starts servers; at the end they are stopped."""
    started = {}

    def start(sessions):
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        started[address] = subprocess.Popen([sys.executable, str(SERVER), str(port), str(sessions)])
        return address

    start.processes = started
    yield start
    for process in started.values():
        process.terminate()
        assert process.wait(30) is not None


@pytest.fixture(scope="module")
def address(serve):
    """Of a server with eight places."""
    address = serve(8)
    from_openenv(address, connect_seconds=START)
    return address


def bisect(row, shown):
    """Guesses by halves, from what it was shown."""
    low, high = 0, 9
    for hint in shown[1:]:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if hint == "It is more." else (low, middle - 1)
    return str((low + high) // 2)


def expected(seed):
    """The same game, without a server."""
    number, shown, rewards = seed * 7 % 10, ["Guess a number from 0 to 9."], []
    while True:
        guess = int(bisect(None, shown))
        rewards.append(1.0 if guess == number else -0.25)
        if guess == number or len(rewards) == 4:
            return shown, rewards
        shown.append("It is more." if guess < number else "It is less.")


ROWS = [{"prompt": [], "seed": seed} for seed in range(8)]


def test_eight_games_at_once(play, address):
    game = from_openenv(address, columns=["seed"])
    for _ in range(3):  # places are free again when an episode is over
        played = play(game, ROWS, bisect)
        for row, found in zip(ROWS, played, strict=True):
            assert (found.shown, found.rewards, found.lost, found.done) == (*expected(row["seed"]), None, True)
    assert len({len(found.shown) for found in played}) > 1


def test_fields_are_those_of_the_server_and_functions_do_as_well(play, address):
    game = from_openenv(
        address.replace("http", "ws") + "/",
        action=lambda text: {"guess": text.removeprefix("<answer>")},
        observation=lambda seen: [{"role": "user", "content": f"{seen['hint']} ({seen['tries']})"}],
    )
    (found,) = play(game, [{}], lambda row, shown: "<answer>3")
    said = ["Guess a number from 0 to 9. (0)", "It is less. (1)", "It is less. (2)", "It is less. (3)"]
    assert found.shown == [[{"role": "user", "content": text}] for text in said]
    assert found.rewards == [-0.25] * 4
    assert found.done


def test_openenvs_own_client(play, address):
    game = from_openenv(
        lambda: GenericEnvClient(base_url=address), action="guess", observation="hint", columns=["seed"]
    )
    played = play(game, ROWS, bisect)
    assert [(found.shown, found.rewards) for found in played] == [expected(row["seed"]) for row in ROWS]
    with pytest.raises(ConfigError, match="needs action= and observation="):
        from_openenv(lambda: GenericEnvClient(base_url=address))


def test_what_a_server_does_not_know_is_refused_at_once(address):
    with pytest.raises(ConfigError, match=r"no field 'gues'. Did you mean 'guess'\? Fields: guess\."):
        from_openenv(address, action="gues")
    with pytest.raises(ConfigError, match=r"no field 'reward'. Fields: hint, tries\."):
        from_openenv(address, observation="reward")
    with pytest.raises(ConfigError, match="no address of a server"):
        from_openenv("ftp://somewhere")


def test_a_server_that_is_not_there_is_named_with_the_deadline(play, serve):
    port = free_port()
    with pytest.raises(ConfigError, match=rf"No OpenEnv server answered at http://127.0.0.1:{port} within 0.5 s"):
        from_openenv(f"127.0.0.1:{port}", connect_seconds=0.5)


def test_a_server_that_went_away_ends_trajectories_by_name(play, serve):
    address = serve(1)
    game = from_openenv(address, connect_seconds=START)
    process = serve.processes[address]

    def stop_it(row, shown):
        process.kill()
        process.wait()
        return "3"

    (found,) = play(game, [{}], stop_it)
    assert f"The OpenEnv server at {address} closed the connection amid 'step'" in found.lost
    (found,) = play(game, [{}], bisect)
    assert f"The OpenEnv server at {address} accepts no connection" in found.lost


def test_too_many_episodes_for_a_server(play, serve):
    address = serve(2)
    game = from_openenv(address, connect_seconds=START)
    played = play(game, ROWS[:3], bisect)
    (lost,) = [found.lost for found in played if found.lost is not None]
    assert "it plays 2 episodes at once. Start it with a larger max_concurrent_envs, or set rollout_options" in lost
    assert all(found.done for found in play(game, ROWS[:2], bisect))


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        ("no number", "refused 'step': invalid literal for int() with base 10: 'no number' (EXECUTION_ERROR)"),
        ("9" * 101, "refused 'step': Invalid message: guess: String should have at most 100 characters"),
    ],
)
def test_an_action_that_the_environment_refuses_ends_its_trajectory(play, address, says, cause):
    (found, other) = play(from_openenv(address), [{"says": says}, {"says": "0"}], lambda row, shown: row["says"])
    assert cause in found.lost
    assert found.lost.startswith("environment 'OpenEnv.step' raised ServerError: The OpenEnv server at")
    assert (other.done, other.rewards) == (True, [1.0])


def test_a_step_past_its_deadline_leaves_its_place(play, serve):
    game = from_openenv(serve(1), connect_seconds=START)
    (found,) = play(game, [{}], lambda row, shown: "hang", tool_timeout=0.5)
    assert found.lost == "environment 'OpenEnv.step' did not return within 0.5 s; it was cancelled."
    (found,) = play(game, [{}], lambda row, shown: "0", tool_timeout=30)
    while found.lost is not None and "plays 1 episodes" in found.lost:  # its step is not over yet
        (found,) = play(game, [{}], lambda row, shown: "0", tool_timeout=30)
    assert found.done


def test_long_observations(play, address):
    (found,) = play(from_openenv(address), [{}], lambda row, shown: "long", turns=1)
    assert len(found.shown[1]) == 3 << 20


def test_columns_that_are_not_there_or_no_json(play, address):
    game = from_openenv(address, columns=["seed"])
    missing, odd = play(game, [{}, {"seed": b"1"}], bisect)
    assert "The dataset has no column 'seed', which from_openenv(columns=…) names." in missing.lost
    assert "cannot be sent 'reset': Object of type bytes is not JSON serializable." in odd.lost
