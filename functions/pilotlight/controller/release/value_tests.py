"""Whether a schema accepts single values. What compiling and checking cost is charged first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pilotlight.controller.release.argument_schemas import unfold_schema
from pilotlight.controller.release.comparison_steps import TEXT_PER_STEP, StepBudget
from pilotlight.controller.release.schema_nodes import count_nodes, references
from pilotlight.errors import InvalidInput
from pilotlight.validation.json_schema import compile_schema
from pilotlight.validation.schema_cost import pattern_weights

if TYPE_CHECKING:
    import jsonschema_rs

COMPILED_PER_STEP = 2
"""Parts of a schema that are compiled per step."""
VISITED_PER_STEP = 500
"""Parts of a schema that one part of a value is checked against, per step."""
MATCHED_PER_STEP = 5_000
"""Product of pattern states and bytes matched, per step."""
SLOW_STEPS = 2_000
"""Cost of a value whose patterns do not match in linear time: the library gives up after some tens
of milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTest:
    """Compiled schema that tests single values.

    Attributes:
        of: the schema, referenced so that its id is not reused.
        validator: None: every value counts as rejected.
        parts: number of parts of the schema, with references followed.
        states: number of states of its patterns.
        is_linear: its patterns match in linear time.
    """

    of: Mapping[str, Any]
    validator: jsonschema_rs.Validator | None
    parts: int
    states: int
    is_linear: bool

    def accepts(self, value: Any, steps: StepBudget) -> bool:
        """Whether the schema accepts the value. Raises ComparisonTooLarge without testing it, if
        that would cost too much."""
        text = json.dumps(value)
        visits, matched = (
            count_nodes(value) * self.parts // VISITED_PER_STEP,
            len(text) * self.states // MATCHED_PER_STEP,
        )
        steps.take(
            1
            + len(text) // TEXT_PER_STEP
            + visits
            + matched
            + (0 if self.is_linear else SLOW_STEPS)
        )
        return self.validator is not None and self.validator.is_valid(value)


def compile_test(
    schema: Mapping[str, Any], named: Mapping[str, Any], steps: StepBudget
) -> ValueTest:
    """Compile a schema. `named`: definitions that it may refer to."""
    whole = {**named, **schema}
    steps.take(count_nodes(whole) // COMPILED_PER_STEP)
    none = ValueTest(of=schema, validator=None, parts=0, states=0, is_linear=True)
    if any(
        not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references(schema)
    ):
        return none
    states = pattern_weights(whole)
    steps.take(states // COMPILED_PER_STEP)
    try:
        validator, is_linear = compile_schema(whole, "the schema")
    except InvalidInput:
        # a revision from before such schemas were rejected: no value counts as accepted
        return none
    return ValueTest(
        of=schema,
        validator=validator,
        parts=unfold_schema(whole),
        states=states,
        is_linear=is_linear,
    )
