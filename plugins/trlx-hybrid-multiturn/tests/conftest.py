"""What tests of tools share."""

import threading

import pytest


@pytest.fixture
def gate():
    """What hanging tools wait for: closed while the test runs, open at its end at the latest."""
    event = threading.Event()
    yield event
    event.set()
