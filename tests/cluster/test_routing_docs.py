"""docs/routing.md names every setting with its default, every strategy and every state."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tokenmill.cluster.breaker import BreakerPolicy
from tokenmill.cluster.health import HealthPolicy, State
from tokenmill.cluster.router import RouterPolicy
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.cluster.strategies import STRATEGIES

PAGE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()


def table(name: str) -> dict[str, str]:
    """Setting -> default, as the table under `name` has them."""
    rows = PAGE.partition(f"| setting (`{name}`) | default | |\n|---|---|---|\n")[2].partition("\n\n")[0]
    return {setting: default.strip("`") for setting, default in re.findall(r"^\| `(\w+)` \| (\S+) \|", rows, re.MULTILINE)}


@pytest.mark.parametrize("policy", [RouterPolicy, HealthPolicy, BreakerPolicy, SeparationPolicy])
def test_every_setting_is_documented_with_its_default(policy: type[msgspec.Struct]) -> None:
    documented = table(policy.__name__)
    defaults = {field.name: field.default for field in msgspec.structs.fields(policy)}
    assert list(documented) == list(defaults)
    assert {name: msgspec.convert(text.lower(), type(defaults[name]), strict=False) for name, text in documented.items()} == defaults


def test_every_strategy_and_every_state_is_documented() -> None:
    assert re.findall(r"^\| `(\w+)`(?: \(default\))? \| [^|]+ \| (?:all|two|nothing) \|$", PAGE, re.MULTILINE) == list(STRATEGIES)
    health = PAGE.partition("## Health\n")[2]
    assert re.findall(r"^\| (\w+) \| ", health, re.MULTILINE)[: len(State) + 1] == ["state", *State]
