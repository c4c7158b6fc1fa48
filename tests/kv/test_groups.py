"""KV groups describe a model's layers without contradiction."""

import pytest

from tokenmill.kv.groups import KVGroup, Whole, Window, check_groups


def test_gemma_has_two_groups_and_a_plain_model_one() -> None:
    check_groups([KVGroup("whole", Whole(), (0, 1))])
    check_groups([KVGroup("window", Window(512), (0, 1, 2)), KVGroup("whole", Whole(), (3,))])


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [KVGroup("whole", Whole(), ())],
        [KVGroup("same", Whole(), (0,)), KVGroup("same", Window(8), (1,))],
        [KVGroup("whole", Whole(), (0, 1)), KVGroup("window", Window(8), (1,))],
    ],
)
def test_contradictions_are_our_own_fault(groups: list[KVGroup]) -> None:
    with pytest.raises(AssertionError):
        check_groups(groups)


def test_a_window_has_at_least_one_token() -> None:
    with pytest.raises(AssertionError, match="0 tokens"):
        Window(0)
