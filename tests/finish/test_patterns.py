from hypothesis import given
from hypothesis import strategies as st
from tests.finish.reference import open_tail

from klero.finish.patterns import ROOT, Patterns

WORDS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4, unique=True)


@given(WORDS, st.text("abc", max_size=20))
def test_each_node_knows_its_end_and_its_open_tail(patterns, stream):
    automaton = Patterns(patterns)
    node = ROOT
    for num in range(len(stream) + 1):
        seen = stream[:num]
        if num:
            node = automaton.step(node, stream[num - 1])
        ends = [p for p in patterns if seen.endswith(p)]
        end = automaton.end_of_node(node)
        assert (None if end is None else patterns[end]) == max(ends, key=len, default=None)
        assert automaton.num_open[node] == open_tail(seen, patterns)


def test_no_patterns_match_nothing():
    automaton = Patterns(())
    assert not automaton
    assert automaton.step(ROOT, "a") == ROOT
    assert automaton.end_of_node(ROOT) is None
    assert automaton.num_open[ROOT] == 0
