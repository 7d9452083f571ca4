"""A tool whose answer has no text: a number of more digits than Python prints."""

from .lists import conversing

NUMBER = "What becomes of a run whose tool returns `7**9999`"
ENDS = "the step ends"


def search(query: str) -> int:
    """Calculate.

    Args:
        query: what.
    """
    return 7**9999


def measure(library):
    try:
        with conversing(library, [search]):
            return ENDS
    except Exception as error:
        return f"the run ends: {type(error).__name__}"


def right(found):
    return found == ENDS
