from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.cli.conversation import Conversation
from tokenmill.core.errors import ContextLengthExceeded

RUN = "from tokenmill.cli.main import main; main()"
COMMAND = [sys.executable, "-c", RUN, "chat"]
SHORT = ["--max-tokens", "6", "--temperature", "0", "--max-model-len", "256"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> str:
    return str(smollm2_path)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=256, kv_cache_config={"memory_budget_gb": 0.1}) as made:
        yield made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def answer(llm: LLM, *messages: dict[str, str]) -> str:
    return llm.chat(messages, GREEDY)[0].outputs[0].text


def chat(model: str, *entries: str, args: list[str] = SHORT) -> subprocess.CompletedProcess[str]:
    """A conversation without a terminal."""
    text = "".join(f"{entry}\n" for entry in entries)
    return subprocess.run([*COMMAND, model, *args], input=text, capture_output=True, text=True, timeout=60, check=False)


class Terminal:
    """The chat on a pseudo terminal, and what it has shown so far."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str, key: str = "") -> None:
        """Read until new output matches; what comes before and in the match is then old. `key` is pressed when nothing comes."""
        deadline = time.monotonic() + 60
        while not (match := re.search(pattern, self.shown[self._seen :])):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.shown[self._seen :]!r}"
            if not select.select([self._ours], [], [], 1)[0]:
                self.type(key)
            else:
                try:
                    self.shown += os.read(self._ours, 65536).decode(errors="replace")
                except OSError as error:
                    raise AssertionError(f"the chat ended before {pattern!r}: {self.shown!r}") from error
        self._seen += match.end()

    def end(self) -> int:
        """The exit status."""
        return self.process.wait(60)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    """Make the terminal the child's own, so that Ctrl-C typed there reaches it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


PROMPT = ">>> "


def test_without_a_terminal_each_line_is_a_message_and_the_conversation_goes_on(model: str, llm: LLM) -> None:
    result = chat(model, "Hello", "", "Say more", "/exit", "never read")
    first = answer(llm, user("Hello"))
    second = answer(llm, user("Hello"), assistant(first), user("Say more"))
    assert (result.returncode, result.stdout) == (0, f"{first}\n{second}\n")
    assert result.stderr == "[cut off: --max-tokens 6]\n" * 2


def test_the_end_of_the_input_ends_the_chat(model: str) -> None:
    result = chat(model)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_clear_forgets_and_regenerate_asks_again_and_system_is_kept(model: str, llm: LLM) -> None:
    result = chat(model, "Hello", "/clear", "Name a colour", "/regenerate", "/system Speak French", "/clear", "Hello", "/system")
    colour, hello = answer(llm, user("Name a colour")), answer(llm, user("Hello"))
    french = answer(llm, {"role": "system", "content": "Speak French"}, user("Hello"))
    assert result.stdout == f"{hello}\n{colour}\n{colour}\n{french}\n"
    assert result.stderr.count("[the conversation is forgotten]") == 2
    assert result.stderr.endswith("[system: Speak French]\n")


def test_commands_are_explained_and_unknown_ones_refused(model: str) -> None:
    result = chat(model, "/help", "/halp", "/regenerate")
    assert result.returncode == 1
    for word in ("/help", "/clear", "/system", "/regenerate", "/exit", "Ctrl-C", "Ctrl-D"):
        assert word in result.stderr
    assert "tokenmill: /halp is no command: /help lists them" in result.stderr
    assert "tokenmill: there is no answer yet that could be made again" in result.stderr
    assert result.stdout == ""


def test_several_lines_between_quotes_are_one_message(model: str, llm: LLM) -> None:
    assert chat(model, '"""Hello', "  you", 'there"""').stdout == answer(llm, user("Hello\n  you\nthere")) + "\n"


def test_a_space_makes_a_message_of_what_looks_like_a_command(model: str, llm: LLM) -> None:
    assert chat(model, " /etc").stdout == answer(llm, user(" /etc")) + "\n"


def test_a_conversation_that_no_longer_fits_says_so_and_clear_is_the_way_out(model: str, llm: LLM) -> None:
    result = chat(model, "Hello", "word " * 300, "/clear", "Hello")
    hello = answer(llm, user("Hello"))
    assert (result.returncode, result.stdout) == (1, f"{hello}\n{hello}\n")
    assert "the conversation has become too long: prompt has" in result.stderr
    assert "model context is 256" in result.stderr
    assert "/clear begins a new one" in result.stderr


def test_an_answer_that_fills_the_context_is_told(model: str) -> None:
    result = chat(model, "Count to one thousand.", args=["--temperature", "0", "--max-model-len", "48"])
    assert result.stderr == "[cut off: the context is full, /clear begins a new conversation]\n"


def test_input_that_is_not_utf8_is_a_message_that_is_refused(model: str) -> None:
    result = subprocess.run([*COMMAND, model, *SHORT], input=b"a\xff\n/clear\n", capture_output=True, timeout=60, check=False)
    assert result.returncode == 1
    assert b"not valid Unicode" in result.stderr
    assert b"[the conversation is forgotten]" in result.stderr


def test_a_bad_option_is_told_before_anything_is_loaded() -> None:
    result = chat("no such model", args=["--top-p", "2"])
    assert (result.returncode, result.stderr) == (1, "tokenmill: top_p is 2.0, but must be above 0 and at most 1\n")


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(model: str) -> None:
    with Terminal(model, "--temperature", "0", "--max-model-len", "2048") as terminal:
        terminal.wait_for(r"context 2048 tokens\. /help shows the commands, Ctrl-D ends\.")
        terminal.wait_for(PROMPT)
        terminal.type("Write a long story about a king.\n")
        terminal.wait_for(r"king\.\r\n")
        terminal.wait_for(r"\w+ \w+ \w+ ")
        terminal.type("\x03")
        terminal.wait_for(r"\[stopped\]")
        terminal.wait_for(PROMPT)
        terminal.type("half a line")
        terminal.wait_for("half a line")
        # CPython does not see a signal that comes just before its readline begins to wait, until the next key.
        terminal.type("\x03")
        terminal.wait_for(r"\[Ctrl-D or /exit ends\]", key="\x03")
        terminal.wait_for(PROMPT)
        terminal.type("/clear\n")
        terminal.wait_for(r"forgotten")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def test_a_terminal_edits_lines_recalls_them_and_takes_a_paste_whole(model: str, llm: LLM) -> None:
    with Terminal(model, *SHORT) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hellp\x7fo\n")
        hello = answer(llm, user("Hello"))
        terminal.wait_for(re.escape(hello.splitlines()[0]))
        terminal.wait_for(PROMPT)
        terminal.type("/clear\n")
        terminal.wait_for("forgotten")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[A\x1b[A\n")
        terminal.wait_for(re.escape(hello.splitlines()[0]))
        terminal.wait_for(PROMPT)
        terminal.type("/clear\n")
        terminal.wait_for("forgotten")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[200~Hello\nyou there\x1b[201~")
        terminal.wait_for("you there")
        terminal.type("\n")
        pasted = answer(llm, user("Hello\nyou there"))
        terminal.wait_for(re.escape(pasted.splitlines()[0]))
        terminal.wait_for(PROMPT)
        terminal.type("/exit\n")
        assert terminal.end() == 0


def test_without_a_terminal_ctrl_c_between_answers_ends_the_chat(model: str) -> None:
    with subprocess.Popen([*COMMAND, model, *SHORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hello\n/help\n")
        process.stdin.flush()
        assert process.stdout.readline()
        assert process.stderr is not None
        while b"needs a space" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_what_was_said_until_the_reader_left_stays_in_the_conversation(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=50))
    with closing(conversation.ask("Hello")) as pieces:
        heard = next(pieces) + next(pieces)
    assert conversation.turns == [user("Hello"), assistant(heard)]
    assert conversation.finish_reason is None
    assert llm.get_kv_cache_stats()["used_frames"] == 0
    assert conversation.take_back() == "Hello"
    assert conversation.take_back() is None


def test_a_question_that_was_refused_leaves_no_trace(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, system="Be brief.")
    said = "".join(conversation.ask("Hello"))
    with pytest.raises(ContextLengthExceeded):
        "".join(conversation.ask("word " * 300))
    assert conversation.turns == [user("Hello"), assistant(said)]
    conversation.clear()
    assert conversation.turns == []
    assert conversation.system == "Be brief."


@pytest.mark.heavy
def test_a_base_model_does_not_chat_unless_a_template_is_chosen() -> None:
    result = chat("gemma3:270m", "Hello")
    assert (result.returncode, result.stdout) == (1, "")
    assert "gemma3:270m has no chat template: `tokenmill run --raw gemma3:270m` continues a text" in result.stderr
    chosen = chat("gemma3:270m", "Hello", args=[*SHORT, "--chat-template", "chatml"])
    assert chosen.returncode == 0
    assert re.fullmatch(r"\[the model says nothing\]\n|\[cut off: --max-tokens 6\]\n|", chosen.stderr)
    assert "<|im_end|>" not in chosen.stdout
