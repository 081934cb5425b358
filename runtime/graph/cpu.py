"""What the CPU runs together."""

from nibblelm.graph import Rule, add_norm

RULES: tuple[Rule, ...] = (add_norm,)
RELATED_RULES = RULES
