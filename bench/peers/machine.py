"""Facts about the machine that a reader needs to judge figures."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from tokenmill.measure.machine import Machine

TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def facts() -> dict[str, str]:
    """By name, in the order of the report."""
    info = dict(
        (part.strip() for part in line.split(":", 1)) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )  # of the last processor; they are alike
    flags = info.get("flags", "").split()
    here = Machine.here()
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()
    family = f", family {info['cpu family']} model {info['model']}" if "cpu family" in info else ""
    return {
        "processor": here.cpu + family + (", virtual machine" if "hypervisor" in flags else ""),
        "cores used": str(here.cpus),
        "instructions": ", ".join(flag for flag in TELLING_FLAGS if flag in flags) or "baseline",
        "largest cache": f"{here.cache / 2**20:.0f} MiB",
        "memory": f"{here.memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        "compiler": compiler[0] if compiler else "none",
        "Python": here.python,
    }
