"""`tokenmill eval`"""

from __future__ import annotations

COMMANDS = {
    "perplexity": "Measure what a KV format costs in perplexity.",
    "agreement": "Compare next-token distributions with those of bf16 KV.",
    "needle": "Ask for a sentence hidden in a long text.",
    "tasks": "Compare answers: arithmetic, copying, English and Chinese prompts.",
}
