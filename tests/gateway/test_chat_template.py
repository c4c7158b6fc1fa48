"""`serve --chat-template` with the real SmolLM2."""

from __future__ import annotations

from pathlib import Path

import serving

MESSAGES = [{"role": "user", "content": "Say hello."}]


def test_a_chosen_template_takes_the_place_of_the_models_own(smollm2_path: Path) -> None:
    options = ["--port", "0", "--served-model-name", "smol", "--kv-memory-gb", "0.1", "--max-model-len", "256"]
    command = [*serving.TOKENMILL, "serve", str(smollm2_path), *options, "--chat-template", "chatml"]
    with serving.running(command) as process:
        served = serving.Served(process, "")
        served.url = served.until_ready("ready").split(" s: ")[1].split("/v1")[0]
        with served.http() as http:
            tokens = http.post("/tokenize", json={"model": "smol", "messages": MESSAGES}).json()["tokens"]
            text = http.post("/detokenize", json={"model": "smol", "tokens": tokens}).json()["prompt"]
            assert text == "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
            body = {"model": "smol", "messages": MESSAGES, "max_tokens": 32, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert answer["message"]["content"]
        assert "<|im_end|>" not in answer["message"]["content"]


def test_a_template_that_is_not_there_is_told_before_anything_is_loaded(smollm2_path: Path) -> None:
    with serving.running([*serving.TOKENMILL, "serve", str(smollm2_path), "--port", "0", "--chat-template", "no-such.jinja"]) as process:
        assert process.wait(30) == 1
