"""Frames survive any cutting, and nothing that is no frame is taken for one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_ray.launch.frames import LONGEST, Kind, Unpacker, packed

frames = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300)), max_size=8)


@given(frames, st.lists(st.integers(0, 2000), max_size=10))
def test_a_stream_cut_anywhere_is_the_frames_that_were_sent(sent, cuts):
    stream = b"".join(packed(*frame) for frame in sent)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    unpacker, received = Unpacker(), []
    for start, end in pairwise(edges):
        received += unpacker.feed(stream[start:end])
    assert received == sent


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"o" + (LONGEST + 1).to_bytes(4, "big"), b"?\0\0\0\0"])
def test_another_language_is_refused(data):
    with pytest.raises(ValueError, match=r"frame|valid Kind"):
        Unpacker().feed(data)
