"""The bounded matcher agrees with `re.match` on everything it accepts."""

import random
import re

import pytest

from nibblelm.checkpoint.patterns import NamePattern
from nibblelm.errors import ConfigError

SHIPPED = [
    *(
        r".*mlp\.gate$",
        r".*layers\.\d+\.mlp\..*",
        r"model\.(?!.*lm_head).*_proj$",
        r"",
        r".*",
        r"(q|k|v)_proj",
        r"lm_head",
    ),
    *(
        r"[^.]*\.[a-c_]+\.\w+",
        r"(?:.*\.)?lm_head\Z",
        r"^model\.layers\.(0|1[0-9]?)\..*",
        r".*experts\.\d+\.(up|gate)_proj$",
    ),
]
NAMES = [
    "",
    "lm_head",
    "model.lm_head",
    "q_proj",
    "model.norm",
    "a.b_c.dd",
    "model.embed_tokens",
    "Ünï.cödé_proj",
    "x\n",
]
NAMES += [
    f"model.layers.{i}.{part}" for i in (0, 1, 9, 10, 31) for part in ("mlp.gate", "mlp.up_proj", "self_attn.q_proj")
]
NAMES += ["model.layers.3.mlp.experts.17.gate_proj", "model.layers.3.mlp.experts.17.gate_proj.x"]


@pytest.mark.parametrize("pattern", SHIPPED)
def test_patterns_as_shipped(pattern: str) -> None:
    matcher = NamePattern(pattern)
    assert [matcher.matches(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    atoms = ["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\d", r"\.", "[a-b1]", r"[^\w]", "^", "$"]
    parts = []
    for _ in range(rng.randint(1, 4)):
        atom = rng.choice(atoms)
        if depth < 2 and rng.random() < 0.4:
            opening = rng.choice(["(", "(?:", "(?=", "(?!"])
            atom = (
                opening + random_pattern(rng, depth + 1) + rng.choice(["", "|" + random_pattern(rng, depth + 1)]) + ")"
            )
        if atom not in "^$" and rng.random() < 0.4:
            atom += rng.choice(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}", "{2,3}?"])
        parts.append(atom)
    return "".join(parts)


def test_random_patterns() -> None:
    rng, compared, matched = random.Random(0), 0, 0
    for _ in range(3000):
        pattern = random_pattern(rng)
        try:
            matcher = NamePattern(pattern)
        except ConfigError:  # nested deeper than is supported
            continue
        for _ in range(10):
            name = "".join(rng.choices("abc.1\n", k=rng.randrange(9)))
            expected = re.match(pattern, name) is not None
            assert matcher.matches(name) == expected, (pattern, name)
            compared, matched = compared + 1, matched + expected
    assert compared > 15_000
    assert 0.1 < matched / compared < 0.9


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "a**", "[z-a]", r"(a)\1", "(?i)a", "(?i:a)", r"\bword", "(?<=a)b", "(?<!a)b", "(?>a)", "a*+"),
        *("((a*)*)*", "(?=(?=(?=a)))", "x" * 513, "(" * 200 + ")" * 200 + "{9}{9}", "a{99999999999999}"),
    ],
)
def test_refuses_what_it_cannot_decide(pattern: str) -> None:
    with pytest.raises(ConfigError, match="cannot use the pattern"):
        NamePattern(pattern)
