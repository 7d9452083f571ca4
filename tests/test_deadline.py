"""Deadlines of what starts, on hosts that have other work."""

import os

import pytest
from trlx_hybrid.interprocess import deadline


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (0.9, 1), (3.0, 3), (100.0, 8)])
def test_a_start_may_take_as_long_as_the_host_is_busy(monkeypatch, load, times):
    monkeypatch.setattr(os, "getloadavg", lambda: (load * 4, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert deadline.granted(60.0) == 60.0 * times
