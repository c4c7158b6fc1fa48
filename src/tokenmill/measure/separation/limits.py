"""What is promised of separation, beside what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmill.measure.limits import Limit
from tokenmill.measure.report import Row, by_key
from tokenmill.measure.separation.setups import SEPARATED
from tokenmill.measure.separation.tables import article_row, number, stalls_count

GAIN = Limit("ITL p99, mixed 2048 / separated", 3.0, least=True)
"""Where stalls are frequent enough to be seen at that percentile."""
HIDDEN = Limit("share of copying KV that nobody waits for", 0.8, least=True)


def limit_rows(setups: Sequence[Row], transfers: Sequence[Row]) -> Iterator[Row]:
    """A row for each limit and point of which there are figures: of an interrupted measurement there are fewer."""
    for prompt, of_prompt in by_key(setups, "prompt_tokens").items():
        for rate, rows in by_key(of_prompt, "rate").items():
            own = next((row for row in rows if row["setup"] == SEPARATED), None)
            article = article_row(rows)
            if own is not None and article is not None and number(own, "itl_p99") > 0:
                gain = number(article, "itl_p99") / number(own, "itl_p99")
                yield GAIN.row(gain, f"{prompt} x {rate:g}/s", judged=stalls_count(article))
    for row in transfers:
        if row["hidden"] is not None:
            yield HIDDEN.row(number(row, "hidden"), f"{row['prompt_tokens']} x {number(row, 'rate'):g}/s")
