from __future__ import annotations

import pytest

from tokenmill.measure.events import EventReader
from tokenmill.measure.serving import Record

EVENTS = [
    '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
    '{"choices": [{"delta": {"content": "h\u00e9\u2028"}}]}',  # some take U+2028 for the end of a line
    '{"choices": [{"delta": {"reasoning_content": "\\n"}}]}',
    '{"choices": [{"text": "data: x"}]}',
    '{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}}',
    "[DONE]",
]


def stream(*events: str, end: str = "\n", field: str = "data: ") -> bytes:
    return "".join(f"{field}{event}{end}{end}" for event in events).encode()


def read(*chunks: bytes) -> Record:
    """What was recorded when the first chunk arrived at 1, the second at 2, …"""
    record = Record(0.0)
    reader = EventReader(record)
    for at, chunk in enumerate(chunks, 1):
        reader.feed(chunk, float(at))
        if record.error is not None:
            return record
    reader.end(len(chunks) + 1.0)
    return record


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("field", ["data: ", "data:"])
def test_a_stream_may_be_split_anywhere(end: str, field: str) -> None:
    whole = stream(*EVENTS, end=end, field=field)
    for at in range(len(whole) + 1):
        record = read(whole[:at], whole[at:])
        assert record.error is None
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 5, 2)
        assert len(record.times) == 3
    every_byte = read(*(whole[i : i + 1] for i in range(len(whole))))
    assert every_byte.error is None
    assert len(every_byte.times) == 3
    assert every_byte.output_tokens == 5


def test_a_piece_has_come_when_the_end_of_its_line_has() -> None:
    first, second = stream('{"choices": [{"text": "a"}]}'), stream('{"choices": [{"text": "b"}]}', "[DONE]")
    assert read(first, second).times == [1.0, 2.0]
    assert read(first + second).times == [1.0, 1.0]
    assert read(first[:-3], first[-3:] + second[:5], second[5:]).times == [2.0, 3.0]


def test_the_last_line_needs_no_end() -> None:
    record = read(stream('{"choices": [{"text": "a"}]}'), b"data: [DONE]")
    assert record.error is None
    assert record.output_tokens == 1  # pieces of text are counted where the server does not


def test_other_lines_say_nothing() -> None:
    record = read(b": ping\n\nevent: error\nid: 1\nretry\ndata:\ndata\ndata: \n\n" + stream('{"choices": [{"text": "a"}]}', "[DONE]"))
    assert record.error is None
    assert record.times == [1.0]


@pytest.mark.parametrize("events", [[], ['{"choices": [{"text": "a"}]}']])
def test_a_stream_without_its_end_is_an_error(events: list[str]) -> None:
    record = read(stream(*events))
    assert record.error == "the stream ended before its end"
    assert len(record.times) == len(events)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ('{"error": {"message": "out of luck", "code": 500}}', "in the stream: out of luck"),
        ('{"error": "no"}', "in the stream: no"),
        ("{", "an event that is not understood: "),
        ('{"choices": 1}', "an event that is not understood: "),
        ('{"choices": [{"text": "\udcff"}]}', "an event that is not understood: "),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b""])
def test_what_goes_wrong_in_a_stream_is_the_requests_error(event: str, error: str, end: bytes) -> None:
    text = '{"choices": [{"text": "a"}]}'
    bad = b"data: " + event.encode(errors="surrogateescape") + end
    record = read(stream(text), bad + (stream(text, "[DONE]") if end else b""))
    assert record.error is not None
    assert record.error.startswith(error)
    assert record.times == [1.0]  # what comes after it does not count
