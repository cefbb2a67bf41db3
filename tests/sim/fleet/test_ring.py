"""The ring: who owns a key, who takes it over, and how far load may lean."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.fleet.ring import VIRTUAL_NODES, HashRing

NODES = st.lists(st.integers(0, 50), min_size=2, max_size=8, unique=True)
KEYS = range(400)


def ring_of(nodes: list[int]) -> HashRing:
    ring = HashRing()
    for node in nodes:
        ring.add(node)
    return ring


@settings(max_examples=40, deadline=None)
@given(NODES, st.data())
def test_removing_a_node_moves_its_own_keys_and_no_others(nodes: list[int], data: st.DataObject) -> None:
    ring = ring_of(nodes)
    before = {key: ring.find(key) for key in KEYS}
    heirs = {key: list(ring.clockwise(key))[1] for key in KEYS}
    gone = data.draw(st.sampled_from(nodes))
    ring.remove(gone)
    for key in KEYS:
        assert ring.find(key) == (heirs[key] if before[key] == gone else before[key])
    ring.add(gone)
    assert {key: ring.find(key) for key in KEYS} == before


@settings(max_examples=25, deadline=None)
@given(NODES, st.integers(51, 60))
def test_a_new_node_takes_keys_and_moves_none_between_others(nodes: list[int], new: int) -> None:
    ring = ring_of(nodes)
    before = {key: ring.find(key) for key in KEYS}
    ring.add(new)
    assert all(ring.find(key) in (before[key], new) for key in KEYS)


@settings(max_examples=40, deadline=None)
@given(
    NODES,
    st.sampled_from([1.0, 1.25, 2.0]),
    st.lists(st.integers(0, 3), min_size=1, max_size=120),
    st.sampled_from([1.0, 3.0]),
)
def test_no_node_has_more_than_its_bounded_share(
    nodes: list[int], factor: float, keys: list[int], weight: float
) -> None:
    # Mirrokni et al.: after every arrival no node is above ceil(c · m · w / W), whatever the keys are.
    ring = HashRing()
    weights = {node: weight if i == 0 else 1.0 for i, node in enumerate(nodes)}
    for node, own in weights.items():
        ring.add(node, own)
    loads = dict.fromkeys(nodes, 0)
    for count, key in enumerate(keys, 1):
        loads[ring.find_bounded(key, loads, factor)] += 1
        for node in nodes:
            assert loads[node] <= math.ceil(factor * count * weights[node] / sum(weights.values()))


def test_keys_are_spread_by_weight_as_evenly_as_virtual_nodes_allow() -> None:
    ring = HashRing()
    weights = {0: 1.0, 1: 1.0, 2: 2.0}
    for node, weight in weights.items():
        ring.add(node, weight)
    count = 20_000
    owners = Counter(ring.find(key) for key in range(count))
    for node, weight in weights.items():
        share = weight / sum(weights.values())
        # A node's arc is a sum of v exponential gaps: relative deviation 1/sqrt(v), here within four of them.
        assert abs(owners[node] / count - share) < 4 * share / math.sqrt(VIRTUAL_NODES * weight)


def test_an_idle_ring_gives_a_key_to_its_owner() -> None:
    ring = ring_of([3, 5, 8])
    loads = {3: 0, 5: 0, 8: 0}
    for key in KEYS:
        assert ring.find_bounded(key, loads, 1.25) == ring.find(key)
