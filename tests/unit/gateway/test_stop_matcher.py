"""Stop strings are found wherever the text is cut, and hold back no more than they must."""

from hypothesis import given
from hypothesis import strategies as st

from weir_gateway.requests.stop_strings import StopMatcher

LETTERS = "ab\n"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def naive_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reads one character at a time and looks at all that was read."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run_matcher(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    output = ""
    for part in parts:
        result = matcher.push(part)
        output += result.text
        if result.matched is not None:
            return output, result.matched
    return output + matcher.finish(), None


@given(st.lists(st.text(LETTERS, max_size=4), max_size=12), STOPS)
def test_parts_give_what_a_naive_search_of_the_whole_text_gives(parts: list[str], stops: list[str]) -> None:
    assert run_matcher(parts, stops) == naive_search("".join(parts), stops)


@given(st.lists(st.text(LETTERS, max_size=4), max_size=12), STOPS)
def test_text_is_held_back_only_while_it_can_become_a_stop_string(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    read, output = "", ""
    for part in parts:
        result = matcher.push(part)
        if result.matched is not None:
            return
        read += part
        output += result.text
        held = read[len(output) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_may_span_parts() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("so E") == ("so ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("D and more") == ("", "END")


def test_what_only_began_like_a_stop_string_is_output() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ("", None)
    assert matcher.push("EMY") == ("ENEMY", None)
    assert matcher.push("E") == ("", None)
    assert matcher.finish() == "E"


def test_of_stop_strings_that_end_together_the_longest_is_cut_out() -> None:
    assert StopMatcher(["b", "aab"]).push("xaab") == ("x", "aab")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_a_stop_string_is_output_too_if_it_is_wanted() -> None:
    matcher = StopMatcher(["END"], is_included=True)
    assert matcher.push("so E") == ("so ", None)
    assert matcher.push("ND and more") == ("END", "END")


def test_before_it_is_armed_a_stop_string_does_not_count_but_may_begin() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("END EN", is_armed=False) == ("END ", None)
    assert matcher.push("D") == ("", "END")


def test_what_was_complete_before_it_was_armed_does_not_count_later_either() -> None:
    matcher = StopMatcher(["E", "END"])
    assert matcher.push("E", is_armed=False) == ("", None)  # may become END
    assert matcher.push("x") == ("Ex", None)
    assert matcher.push("E") == ("", "E")
