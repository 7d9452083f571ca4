"""The table of what a run cannot have. What each row does to a run is tested where the option is."""

from trlx_hybrid.trl.refusals import OPTIONS

from tests import refusals_page


def test_the_page_prints_the_table():
    assert refusals_page.PAGE.read_text() == refusals_page.page(), "`python -m tests.refusals_page` writes it anew"


def test_each_option_has_a_way_out_and_each_refusal_a_condition():
    for option in OPTIONS:
        assert option.way_out.endswith(".")
        conditions = [refusal.when for refusal in option.refusals]
        assert len(set(conditions)) == len(conditions) > 1
