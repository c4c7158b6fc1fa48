"""Install the engines that tokenmill is compared with. `python bench/peers/install.py [PEER...]`

Each gets an environment of its own in bench/peers/.envs; what is there already is left alone. An engine that cannot be installed is
told, with its log, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from engines import ENGINES, ENVIRONMENTS, Engine, Npm, Pip, chosen


def commands(source: Pip | Npm, home: Path) -> list[list[str]]:
    """The commands that fill an environment, in order."""
    if isinstance(source, Npm):
        return [["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", *source.options, *source.requirements]]
    pip = [str(home / "bin" / "python"), "-m", "pip"]
    filling = [[*pip, "install", *source.options, *source.requirements]]
    return filling + ([[*pip, "uninstall", "--yes", *source.unwanted]] if source.unwanted else [])


def install(engine: Engine) -> bool:
    """Install one engine, unless it is; returns whether it is there."""
    source, home = engine.source, engine.home
    assert source is not None, "this engine has no environment of its own"
    if engine.installed:
        print(f"{engine.name}: installed in {home}")
        return True
    home.mkdir(parents=True, exist_ok=True)
    log = ENVIRONMENTS / f"{engine.name}.install.log"
    print(f"{engine.name}: installing, log in {log}", flush=True)
    settings = {}
    if isinstance(source, Pip):
        venv.create(home, with_pip=True)
        settings = source.settings
    with log.open("w") as output:
        for command in commands(source, home):
            if subprocess.run(command, env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT).returncode:
                print(f"{engine.name}: could not be installed:\n" + "\n".join(log.read_text().splitlines()[-8:]), file=sys.stderr)
                return False
    engine.stamp.touch()
    return True


def main() -> None:
    peers = [engine.name for engine in ENGINES if engine.source is not None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(peers)}; all if none is named")
    names = parser.parse_args().peers or peers
    done = [install(engine) for engine in chosen(names) if engine.source is not None]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
