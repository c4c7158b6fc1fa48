from __future__ import annotations

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.measure.quality.windows import cut_windows


def test_windows_lie_over_the_whole_text_without_overlap() -> None:
    assert cut_windows(range(20), [], 12, 4, "t") == [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]]
    assert cut_windows(range(20), [99], 8, 4, "t") == [[99, 0, 1, 2], [99, 10, 11, 12]]


def test_a_text_that_is_too_short_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match="the text own has 20 tokens, but 3 windows of 8 need 24"):
        cut_windows(range(20), [], 24, 8, "own")
