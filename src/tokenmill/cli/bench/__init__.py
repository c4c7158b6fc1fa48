"""`tokenmill bench`"""

from __future__ import annotations

COMMANDS = {
    "kernels": "Measure single ops beside this machine's ceilings.",
    "latency": "Measure the time to the first token and between tokens.",
    "throughput": "Measure a batch job, or single steps by batch size.",
    "spec": "Measure what speculation gains, and that it changes no answer.",
    "kv": "Measure what prefix sharing, page sizes and formats do for the KV cache.",
    "pd": "Measure what separating prefill from decode gains, and that it changes no answer.",
    "serve": "Put a load on a server and measure what clients see.",
}
