"""Which engine gets which request, for any course of requests, ends and deaths."""

from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_ray.engines.stream import Router

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), st.integers(0, 9)),
        st.tuples(st.just("done"), st.integers(0, 60)),
        st.tuples(st.just("lose"), st.integers(0, 5)),
        st.tuples(st.just("join"), st.integers(6, 9)),
    ),
    max_size=60,
)


def course(servers, events):
    """Runs the events; yields after each what was done, the router, and what must be under way: request -> server."""
    router, under_way, rows, number = Router(range(servers)), {}, {}, 0
    for event, value in events:
        lost = []
        if event == "assign" and router.servers:
            under_way[number] = router.assign(number, value)
            rows[number] = value
            number += 1
        elif event == "done":
            assert router.done(value) == under_way.pop(value, None)
        elif event == "lose":
            lost = router.lose(value)
            assert lost == [request for request, server in under_way.items() if server == value]
            for request in lost:
                del under_way[request]
        elif event == "join":
            router.join(value)
        yield event, router, under_way, rows


@given(st.integers(1, 5), EVENTS)
def test_every_request_is_with_one_living_engine_until_it_is_over(servers, events):
    for _, router, under_way, _ in course(servers, events):
        assert set(under_way.values()) <= set(router.servers)
        for server in router.servers:
            assert router.load(server) == list(under_way.values()).count(server)


@given(st.integers(1, 5), EVENTS)
def test_a_rows_turns_go_where_its_first_went_while_that_lives(servers, events):
    homes = {}
    for event, router, under_way, rows in course(servers, events):
        if event == "assign" and under_way:
            request = max(under_way)
            row = rows[request]
            if homes.get(row) in router.servers:
                assert under_way[request] == homes[row]
            homes[row] = under_way[request]
        elif event == "lose":
            homes = {row: server for row, server in homes.items() if server in router.servers}


@given(st.integers(1, 8), st.integers(0, 64))
def test_new_trajectories_are_shared_out_evenly(servers, count):
    router = Router(range(servers))
    for request in range(count):
        router.assign(request, row=request)
    loads = [router.load(server) for server in router.servers]
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == count


def test_a_new_trajectory_goes_where_least_is_to_do():
    router = Router([0, 1])
    assert [router.assign(request, row=request) for request in range(4)] == [0, 1, 0, 1]
    router.done(1)
    router.done(3)
    assert router.assign(4, row=4) == 1
    assert router.assign(5, row=0) == 0  # its prefix is there, however much there is to do
    assert router.lose(0) == [0, 2, 5]
    assert router.assign(0, row=0) == 1
